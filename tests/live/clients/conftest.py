"""One real server for all clients: the one that the command ``--serve`` starts.

With ``--behind``, a command that starts a `vllm serve`, that one is its engine.  These tests run in an environment of
their own (`make clients`), as the users of a server do: nothing of penstock's is installed beside the clients.
"""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing it asks the network for prices
