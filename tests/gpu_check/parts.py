"""The parts, in their order: first that nothing is broken, then what it costs, then all of it in vLLM."""

from __future__ import annotations

from gpu_check.children import cuda_tests, real_vllm, sanitized
from gpu_check.contents import layouts, poisoned, race
from gpu_check.costs import bandwidth, gap, large_pool
from gpu_check.report import Part

PARTS = (
    Part("cuda-tests", "the engines keep their contract", cuda_tests),
    Part("sanitizer", "the same tests touch no memory that is not theirs", sanitized),
    Part("layouts", "every layout arrives byte by byte", layouts),
    Part("race", "what is overwritten too early is lost without a fence, and never with it", race),
    Part("poison", "blocks that were freed and filled with NaN come back right", poisoned),
    Part("bandwidth", "copies against one contiguous copy", bandwidth),
    Part("pool", "a large pool starts, and keeps what its end is given", large_pool),
    Part("gap", "how saves stretch the time between forwards", gap),
    Part("vllm", "real vLLM's outputs are equal with and without the connector", real_vllm),
)
