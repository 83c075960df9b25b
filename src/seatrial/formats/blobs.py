"""Tensors of a workload that lie in safetensors files, in the problem's folder or a data folder above it.

A path is relative, without '..', and must end up inside one of the roots. Published paths start at
the top of the data set, so leading parts are dropped one by one until a root holds the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from seatrial.errors import ProblemError
from seatrial.formats.dtypes import stored_shape, torch_dtype
from seatrial.model import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

LEVELS_UP = 4  # folders above a problem that may be the data set's top
ROOT_VARIABLE = "FLASHINFER_TRACE_DIR"  # the benchmark's own name for the blobs' root


def check(folder: Path, path: str, key: str, spec: TensorSpec, sizes: Mapping[str, int]) -> None:
    """Raises ProblemError unless the blob is there and its header fits the declared shape and type."""
    _open(folder, path, key, spec, sizes, read=False)


def read(folder: Path, path: str, key: str, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    """The tensor under `key`, contiguous on the CPU; raises ProblemError when it is missing or does not fit."""
    tensor = _open(folder, path, key, spec, sizes, read=True)
    assert tensor is not None
    return tensor.contiguous()


def find(folder: Path, path: str) -> Path:
    """The file that `path` names; raises ProblemError when it is absolute, leaves the roots or is not there."""
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts:
        raise ProblemError(f"blob path '{path}' leaves the problem's folder; use a relative path without '..'")
    for root in _roots(folder.resolve()):
        for start in range(max(1, len(relative.parts) - 1)):  # never the bare file name: too easily another file
            file = root.joinpath(*relative.parts[start:])
            if file.is_file() and file.resolve().is_relative_to(root):
                return file
    raise ProblemError(
        f"blob '{path}' is neither in the problem's folder nor in a data folder above it; download it there"
    )


def _roots(folder: Path) -> Iterator[Path]:
    """The problem's folder, then those above it up to the one that holds a folder called data."""
    yield folder
    for above in list(folder.parents)[:LEVELS_UP]:
        if above == Path(above.anchor):
            break
        yield above
        if (above / "data").is_dir():
            break
    if os.environ.get(ROOT_VARIABLE):
        yield Path(os.environ[ROOT_VARIABLE]).resolve()


def _open(
    folder: Path, path: str, key: str, spec: TensorSpec, sizes: Mapping[str, int], *, read: bool
) -> Tensor | None:
    from safetensors import SafetensorError, safe_open

    file = find(folder, path)
    try:
        with safe_open(file, framework="pt") as blob:
            if key not in blob.keys():  # noqa: SIM118 - not a mapping
                raise ProblemError(
                    f"{file} has no tensor '{key}' but {', '.join(list(blob.keys())[:5])}; correct tensor_key"
                )
            header = blob.get_slice(key)
            _fits(file, key, spec, stored_shape(spec, sizes), tuple(header.get_shape()), str(header.get_dtype()))
            return blob.get_tensor(key) if read else None
    except (SafetensorError, OSError) as fault:
        raise ProblemError(f"{file} cannot be read as safetensors ({fault}); download it again") from fault


def _fits(
    file: Path, key: str, spec: TensorSpec, declared: tuple[int, ...] | None, shape: tuple[int, ...], dtype: str
) -> None:
    if shape != declared:
        raise ProblemError(
            f"{file} holds '{key}' of shape {list(shape)} where {list(declared or ())} is declared; correct one"
        )
    names = _HEADER_TYPES.get(dtype)
    if names is not None and torch_dtype(spec.dtype) != torch_dtype(names):
        raise ProblemError(f"{file} holds '{key}' as {names} where {spec.dtype} is declared; correct one of them")


_HEADER_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "BOOL": "bool",
}
