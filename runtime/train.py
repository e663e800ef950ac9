"""The training loop of `zplan run`: the reference decoder under a plan, on token batches."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from zplan.planner.errors import ZplanError
from zplan.planner.plan_file import Plan, load_plan
from zplan.runtime.board import Board
from zplan.runtime.data import Batches
from zplan.runtime.decoder import Decoder, init_parameter
from zplan.runtime.engine import Engine, initialize
from zplan.runtime.job import Job
from zplan.runtime.progress import Progress, StepRecord, memory_now
