"""Fused operations of a training step: Triton kernels, each with its plain-torch reference beside it in the same file.

`attention` (ranges of context and the own block), `cross_entropy` (rows of logits: loss, metrics, gradient), `norm`
(RMSNorm alone, before linears, and with rotary embedding) and `swiglu`. A public function takes tensors anywhere: where
no kernel can run it computes the reference, which gives the same numbers up to rounding. Whether to use them at all is
decided once, at start (`remote.drafter.attention`, `remote.drafter.workbench`), never here.

Conventions: kernels take contiguous tensors, add up in float32, never wait for the device, and are compiled for widths,
never for lengths: anchors, documents and row lengths may change from step to step.
"""
