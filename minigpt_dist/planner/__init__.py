"""The planner: a model and a cluster in, layouts out, each with what it will hold, send and take.

`shape` counts parameters and operations, `stages` cuts them over a pipeline, `memory`, `communication` and `duration` predict, `search`
judges every layout, `saved` keeps one for `train --plan`. Needs no torch.
"""

from minigpt_dist.planner.cluster import Cluster
from minigpt_dist.planner.communication import Communication, communication
from minigpt_dist.planner.duration import Duration, bubble_fraction, duration
from minigpt_dist.planner.memory import Memory, memory
from minigpt_dist.planner.saved import SavedPlan, read_plan, write_plan
from minigpt_dist.planner.search import Choices, Plan, Search, search
from minigpt_dist.planner.shape import ModelShape
from minigpt_dist.planner.techniques import MEGATRON_2021, Techniques

__all__ = [
    "MEGATRON_2021",
    "Choices",
    "Cluster",
    "Communication",
    "Duration",
    "Memory",
    "ModelShape",
    "Plan",
    "SavedPlan",
    "Search",
    "Techniques",
    "bubble_fraction",
    "communication",
    "duration",
    "memory",
    "read_plan",
    "search",
    "write_plan",
]
