"""Moves block runs straight between KV tensors and pinned slots, a whole call in one driver call.

NOT YET RUN ON A GPU: what is tested is which bytes go where, with a stand-in for the driver that copies in CPU memory.

The driver's `cuMemcpyBatchAsync` (CUDA 12.8) hands a list of copies to the copy engines, and the model keeps the cores
that run kernels. `cuda.bindings`, which comes with torch's CUDA wheels, is asked for the address alone: its wrapper
would make an object of every pointer, and its signature changed when CUDA 13 dropped `failIdx`. An entry point asked
for by version keeps that version's signature on every later driver, so 12.8's is called everywhere.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence

import attrs
import torch

from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.runs import runs_of_a_block

__all__ = ["BATCH_ENTRY_POINT", "BatchCopy", "BatchUnavailable", "BatchedMover", "find_batch_copy"]

_CUDA_VERSION = 12080
_SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the model may still be writing the blocks.

BATCH_ENTRY_POINT = ctypes.CFUNCTYPE(
    ctypes.c_int,  # CUresult
    ctypes.c_void_p,  # dsts
    ctypes.c_void_p,  # srcs
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # count
    ctypes.c_void_p,  # attrs
    ctypes.c_void_p,  # attrsIdxs
    ctypes.c_size_t,  # numAttrs
    ctypes.c_void_p,  # failIdx
    ctypes.c_void_p,  # hStream, not the legacy default one
)
"""`cuMemcpyBatchAsync` as CUDA 12.8 declares it."""


class BatchUnavailable(Exception):
    """The driver's batched copy cannot be used here; the message says why."""


class _MemLocation(ctypes.Structure):
    """`CUmemLocation`; a hint for managed memory, which is not in play."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _MemcpyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes_v1`."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _MemLocation),
        ("dstLocHint", _MemLocation),
        ("flags", ctypes.c_uint),
    )


@attrs.frozen
class BatchCopy:
    """The driver's batched copy on one stream."""

    entry_point: Callable[..., int]
    stream_handle: int

    def __call__(self, destinations: torch.Tensor, sources: torch.Tensor, sizes: torch.Tensor) -> None:
        """Give the stream the copies: int64 addresses and sizes in bytes, contiguous in CPU memory, read at once.

        Raises:
            RuntimeError: The driver refused.
        """
        attributes = _MemcpyAttributes(srcAccessOrder=_SOURCE_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)  # One set of attributes, from the first copy on.
        code = self.entry_point(
            destinations.data_ptr(),
            sources.data_ptr(),
            sizes.data_ptr(),
            sizes.numel(),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            self.stream_handle,
        )
        if code != 0:
            raise RuntimeError(
                f"cuMemcpyBatchAsync of {sizes.numel()} copies failed with CUDA error {code} at copy {failed.value}; "
                "make the engine with batched_from_bytes=None to do without it"
            )


class BatchedMover:
    """Turns block ids and slots into the addresses of every run. Keeps no memory alive: its owner keeps the layout."""

    def __init__(self, layout: BlockLayout, slot_bytes: int, copy: BatchCopy) -> None:
        runs = runs_of_a_block(layout)
        self._copy = copy
        self._slot_bytes = slot_bytes
        # On the CPU whatever torch's default device is: the driver reads these.
        self._addresses, self._strides, self._offsets, self._sizes = (
            torch.tensor(column, dtype=torch.int64, device="cpu")
            for column in zip(*((r.address, r.block_stride, r.slot_offset, r.num_bytes) for r in runs), strict=True)
        )

    def move(self, block_ids: Sequence[int], slots: Sequence[int], host: torch.Tensor, *, writes_slots: bool) -> None:
        """Give the stream every copy of the call. The driver keeps no order among them, and none is needed."""
        ids, to = (torch.tensor(list(n), dtype=torch.int64, device="cpu")[:, None] for n in (block_ids, slots))
        blocks = self._addresses + ids * self._strides
        places = host.data_ptr() + to * self._slot_bytes + self._offsets
        sizes = self._sizes.repeat(len(slots))
        destinations, sources = (places, blocks) if writes_slots else (blocks, places)
        self._copy(destinations, sources, sizes)


def find_batch_copy(stream: torch.cuda.Stream) -> BatchCopy:
    """The driver's batched copy, tried out once: two runs to the device and back.

    Raises:
        BatchUnavailable: The package, the driver or the trial says no.
    """
    try:
        with torch.cuda.device(stream.device):
            copy = BatchCopy(_entry_point(), stream.cuda_stream)
            with torch.cuda.stream(stream):
                _try_out(copy, stream)
    except BatchUnavailable:
        raise
    except Exception as error:  # Whatever goes wrong in a probe is a reason to do without, never to fail the start.
        raise BatchUnavailable(f"{type(error).__name__}: {error}") from error
    return copy


def _entry_point() -> Callable[..., int]:
    driver = importlib.import_module("cuda.bindings.driver")
    code, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", _CUDA_VERSION, 0)
    if int(code) != 0 or not int(address or 0):
        raise BatchUnavailable(f"the CUDA driver has no cuMemcpyBatchAsync of CUDA 12.8 (error {int(code)}); update it")
    return BATCH_ENTRY_POINT(int(address))


def _try_out(copy: BatchCopy, stream: torch.cuda.Stream) -> None:
    sent = torch.arange(32, dtype=torch.uint8, device="cpu").pin_memory()
    returned = torch.zeros(32, dtype=torch.uint8, device="cpu").pin_memory()
    on_device = torch.zeros(32, dtype=torch.uint8, device=stream.device)
    starts, sizes = (torch.tensor(numbers, device="cpu") for numbers in ([0, 16], [16, 16]))
    copy(on_device.data_ptr() + starts, sent.data_ptr() + starts, sizes)
    copy(returned.data_ptr() + starts, on_device.data_ptr() + starts, sizes)
    stream.synchronize()
    if not torch.equal(sent, returned):
        raise BatchUnavailable("cuMemcpyBatchAsync reported success and the bytes did not arrive")
