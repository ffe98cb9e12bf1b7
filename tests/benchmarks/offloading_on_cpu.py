"""vLLM's OffloadingConnector without a GPU: its public hook for a worker of another package, and a plain copy."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvledger.adapters.lab.simulation.connectors import TensorWorker


class TensorOffloadingSpec(CPUOffloadingSpec):
    """vLLM's own, whose worker copies between CPU tensors, in the step in which it is asked to."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of the simulation."""
        return TensorWorker(kv_caches, self.num_chunks, num_questions=0)


def connector(host_bytes: int) -> dict[str, Any]:
    """The `kv_transfer_config`; outputs are saved as well as prompts."""
    extra = {
        "spec_name": TensorOffloadingSpec.__name__,
        "spec_module_path": __name__,
        "cpu_bytes_to_use": host_bytes,
        "offload_prompt_only": False,
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
