"""Runs the public package `dflash` on an exported folder; started by test_public_dflash in an environment of its own.

    python public_dflash.py ASK.json ANSWER.json

ASK names the exported folder, the target's folder, a safetensors file with features [S, C] and block [B, H], the
prompts and how many new tokens. ANSWER holds hidden states, texts and accepted lengths. It imports nothing of ours.
"""

import json
import sys
import time
from pathlib import Path

import dflash.model
import torch
import transformers
from dflash import DFlashDraftModel
from safetensors.torch import load_file


def main(ask_path, answer_path):
    ask = json.loads(Path(ask_path).read_text())
    drafter = DFlashDraftModel.from_pretrained(ask["exported"], dtype=torch.float32).eval()
    target = transformers.AutoModelForCausalLM.from_pretrained(ask["target"], dtype=torch.float32).eval()
    given = load_file(ask["given"])
    with torch.no_grad():
        hidden = drafter(
            position_ids=torch.arange(len(given["features"]) + len(given["block"]))[None],
            noise_embedding=given["block"][None],
            target_hidden=given["features"][None],
        )
    dflash.model._cuda_time = time.perf_counter  # its clock waits for a GPU; here there is none
    decoded = [
        dflash.model.dflash_generate(
            drafter, target, torch.tensor([prompt]), ask["max_new_tokens"], [], return_stats=True
        )
        for prompt in ask["prompts"]
    ]
    answer = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "hidden": hidden[0].tolist(),
        "texts": [found.output_ids[0, found.num_input_tokens :].tolist() for found in decoded],
        "accepted": [found.acceptance_lengths for found in decoded],
    }
    Path(answer_path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
