"""Requests of which the beginning is loaded say what they say without a connector, whatever computes attention."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import pytest

from e2e.engines import ReadLog, read_sound_log
from e2e.latent import YARN, make_latent_model
from kvledger.adapters.lab.demo.engine import RunningEngine, running_engine
from kvledger.adapters.lab.demo.model import FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.vllm

NUM_SHARED, NUM_PROMPT = 64, 144
MAX_TOKENS = 24


@attrs.frozen
class Served(Workload):
    """One request after another; each prompt begins with the same 64 of its 144 tokens."""

    more: dict[str, Any] = attrs.field(factory=dict)
    """Further arguments of `vllm.LLM`."""

    def prompts(self) -> list[list[int]]:
        """The first one is computed, 64 tokens of each other one can be loaded."""
        chance = random.Random(self.seed)

        def tokens(number: int) -> list[int]:
            return [chance.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE) for _ in range(number)]

        shared = tokens(NUM_SHARED)
        return [shared + tokens(NUM_PROMPT - NUM_SHARED) for _ in range(self.num_requests)]

    def engine_arguments(self) -> dict[str, Any]:
        """With what there is more."""
        return {**super().engine_arguments(), **self.more}


def served(block_size: int, **more: Any) -> Served:
    """Chunks of one block; every prompt fits into a step, as vLLM asks where chunked prefill is off."""
    return Served(
        seed=3,
        num_requests=4,
        block_size=block_size,
        chunk_size=block_size,
        num_blocks=64,
        max_num_batched_tokens=1024,
        more=more,
    )


def one_by_one(engine: RunningEngine, workload: Workload) -> list[list[int]]:
    """Outputs, of requests that never share a step."""
    return [engine.generate([prompt], MAX_TOKENS)[0] for prompt in workload.prompts()]


def declined(log: ReadLog) -> list[str]:
    """Why the model was not served."""
    return [note.text for note in log.of_type(e.LogNote) if note.text.startswith("declined: ")]


def outputs_agree(model: Path, workload: Workload, log_dir: Path) -> ReadLog:
    """Serve without and with the connector; the outputs are equal."""
    with running_engine(model, workload) as engine:
        expected = one_by_one(engine, workload)
    with running_engine(model, workload, log_dir) as engine:
        outputs = one_by_one(engine, workload)
    assert outputs == expected
    return read_sound_log(engine.log_path)


def num_loaded(log: ReadLog) -> list[int]:
    """Tokens of each load."""
    return [load.num_tokens for load in log.of_type(e.LoadIssued)]


def write_tokenizer(directory: Path) -> None:
    """One with a word for each token; vLLM's front end of pooling models starts with none."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(VOCABULARY_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)


@pytest.fixture
def leave_chunked_prefill_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines started from now on cut prefills also on the platform that turns that off."""
    from vllm.platforms.cpu import CpuPlatform

    switch_off = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def leave_on(platform: Any, vllm_config: Any) -> None:
        switch_off(platform, vllm_config)
        vllm_config.scheduler_config.enable_chunked_prefill = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(leave_on))


@pytest.mark.parametrize("rope", [None, pytest.param(YARN, marks=pytest.mark.long)], ids=["default rope", "yarn"])
def test_latent_attention_without_chunked_prefill_gets_no_hit(rope: dict[str, Any] | None, tmp_path: Path) -> None:
    """VLLM turns chunked prefill and prefix caching off for MLA on a CPU without AMX, and asked the connector all the
    same: with 64 of 144 tokens loaded three of four outputs differed, and the log was sound.
    """
    model = make_latent_model(tmp_path / "model", **({"rope_parameters": rope} if rope else {}))
    log = outputs_agree(model, served(16, attention_backend="CPU_MLA"), tmp_path / "logs")
    assert num_loaded(log) == []
    reason = "declined: with the attention backend CPU_MLA vLLM turns chunked prefill and prefix caching off"
    assert declined(log)[0].startswith(reason)


@pytest.mark.usefixtures("leave_chunked_prefill_on")
def test_latent_attention_reads_a_loaded_prefix(tmp_path: Path) -> None:
    """The backend for CPU does, if vLLM lets it: what vLLM's platform says is the reason to serve nothing there."""
    model = make_latent_model(tmp_path / "model", rope_parameters=YARN)
    log = outputs_agree(model, served(16, attention_backend="CPU_MLA"), tmp_path / "logs")
    assert declined(log) == []
    assert num_loaded(log) == [NUM_SHARED] * 3


@pytest.mark.parametrize("rotates_right", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_model_that_the_kernel_for_cpu_rotates_by_row_gets_no_hit(
    rotates_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MLA switched off vLLM computes DeepSeek's attention with chunked prefill on, and its rotary kernel takes a
    token's row in the batch for its position: outputs of partial hits differed. The torch code has no such fault.
    """
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    model = make_latent_model(tmp_path / "model")
    more = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if rotates_right else {}
    log = outputs_agree(model, served(32, **more), tmp_path / "logs")
    assert num_loaded(log) == ([NUM_SHARED] * 3 if rotates_right else [])
    found = declined(log)
    assert len(found) == (not rotates_right)
    assert all("rotary kernel for CPU rotates a token of this model by its place in the batch" in why for why in found)


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.long), {"enable_chunked_prefill": False}],
    ids=["prefix caching", "chunked prefill too"],
)
def test_an_operator_who_switches_prefix_caching_off_still_gets_hits(
    more: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """The backend reads prefixes; what is loaded comes from the host pool alone."""
    log = outputs_agree(model, served(32, **more), tmp_path / "logs")
    assert declined(log) == []
    assert num_loaded(log) == [NUM_SHARED] * 3


@pytest.mark.parametrize(
    ("pooling", "is_served"), [("MEAN", False), pytest.param("CLS", False, marks=pytest.mark.long), ("LAST", True)]
)
def test_a_pooled_result_is_over_every_token_of_the_prompt(
    pooling: str, is_served: bool, model: Path, tmp_path: Path
) -> None:
    """A mean over what is left of a prompt behind a hit is another one; the last token's state is the same."""
    from vllm.config import PoolerConfig

    pooler = PoolerConfig(seq_pooling_type=pooling)
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = {"skip_tokenizer_init": False, "tokenizer": str(tmp_path / "tokenizer")}
    workload = served(32, runner="pooling", convert="embed", pooler_config=pooler, **tokenizer)

    def embedded(engine: RunningEngine) -> list[list[float]]:
        every = [{"prompt_token_ids": prompt} for prompt in workload.prompts()]
        return [engine.llm.embed([each], use_tqdm=False)[0].outputs.embedding for each in every]

    with running_engine(model, workload) as engine:
        expected = embedded(engine)
    with running_engine(model, workload, tmp_path / "logs") as engine:
        found = embedded(engine)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    log = read_sound_log(engine.log_path)
    assert (num_loaded(log) != []) == is_served
    assert [f"pooling {pooling}" in reason for reason in declined(log)] == [True] * (not is_served)
