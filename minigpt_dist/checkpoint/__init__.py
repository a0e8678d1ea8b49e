"""Sharded checkpoints: one file a rank, verified before they are believed, never half-written.

The public names; each file of this folder says its own job.
"""

from minigpt_dist.checkpoint.async_saver import AsyncSaver
from minigpt_dist.checkpoint.dcp import export_dcp, import_dcp
from minigpt_dist.checkpoint.errors import CheckpointError
from minigpt_dist.checkpoint.export import export_safetensors, import_safetensors
from minigpt_dist.checkpoint.folder import latest_step_folder, read_manifest
from minigpt_dist.checkpoint.manifest import Manifest
from minigpt_dist.checkpoint.relayout import load_at_layout, load_whole
from minigpt_dist.checkpoint.reshard import load_resharded, merge_states, split_state
from minigpt_dist.checkpoint.retention import keep_last
from minigpt_dist.checkpoint.second_tier import SecondTier
from minigpt_dist.checkpoint.sharded import load_shard, load_sharded, save_shard, save_sharded
from minigpt_dist.checkpoint.verify import verify_checkpoint

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "Manifest",
    "SecondTier",
    "export_dcp",
    "export_safetensors",
    "import_dcp",
    "import_safetensors",
    "keep_last",
    "latest_step_folder",
    "load_at_layout",
    "load_resharded",
    "load_shard",
    "load_sharded",
    "load_whole",
    "merge_states",
    "read_manifest",
    "save_shard",
    "save_sharded",
    "split_state",
    "verify_checkpoint",
]
