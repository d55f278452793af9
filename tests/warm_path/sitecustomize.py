"""Python looks for this on its path as it starts: with WARM_SERVER set it hands a follower to `tests/warm.py`.

So what the product starts by itself is warm too, and no line of the product knows of it. A command of its own stays cold: it
asks its output for more than a forked process can say of files that it was handed.
"""

import os
import sys

words = [word for word in sys.orig_argv[1:] if word != "-P"]
if "WARM_SERVER" in os.environ and words[:2] == ["-m", "orchestrator.follow.follower"]:
    sys.path.append(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120  # pathlib is loaded below
    import warm

    os._exit(warm.ask(os.environ["WARM_SERVER"], words))
