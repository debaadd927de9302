"""A bf16 GGUF file of the weights that a quantised GGUF file holds: what llama.cpp runs beside us, same weights, same
precision. OpenVINO reads no bf16: --half stores the same values in float16.

    python -m bench.peers.to_gguf IN.gguf OUT.gguf
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter, ReaderTensor

_OF_THE_FILE = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version", "split.")
_MOSTLY = {"BF16": 32, "F16": 1}  # llama.cpp's LLAMA_FTYPE_MOSTLY_...


def to_gguf(source: Path, target: Path, tied: bool = False, half: bool = False) -> None:
    """Write the tensors of `source` to `target`, rounded to bf16, and its metadata as they are.

    Vectors are stored in float32, as llama.cpp wants them, but hold the rounded values: those of a bf16 folder.

    tied: the output matrix becomes the token embedding too, as in a Hugging Face folder with tied embeddings.
    half: matrices are stored in float16, after they were rounded to bf16. Its range is smaller: values that it does not
    hold exactly are refused.
    Any architecture, one tensor in memory at a time. Raises ConfigError.
    """
    from gguf import GGUFReader, GGUFWriter

    if not source.is_file():
        raise ConfigError("there is no such GGUF file", got=str(source), fix="name the file to convert")
    if target.exists() and target.samefile(source):
        raise ConfigError("the output would overwrite the input", got=str(target), fix="choose another output")
    reader = GGUFReader(source)
    writer = GGUFWriter(None, reader.fields["general.architecture"].contents())
    _copy_metadata(reader, writer, "F16" if half else "BF16")
    tensors = _tied(reader.tensors) if tied else [(tensor.name, tensor) for tensor in reader.tensors]
    part = target.with_name(target.name + ".part")
    try:
        _write(writer, tensors, part, half)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _copy_metadata(reader: "GGUFReader", writer: "GGUFWriter", stored: str) -> None:
    from gguf import GGUFValueType

    for key, field in reader.fields.items():
        if not key.startswith(_OF_THE_FILE):
            kind, *inner = field.types
            writer.add_key_value(key, field.contents(), kind, inner[0] if inner else None)
    writer.add_key_value("general.file_type", _MOSTLY[stored], GGUFValueType.UINT32)


def _tied(tensors: "list[ReaderTensor]") -> "list[tuple[str, ReaderTensor]]":
    """The output matrix under the embedding's name, and no output: readers then use the embedding for both."""
    by_name = {tensor.name: tensor for tensor in tensors}
    output = by_name.pop("output.weight", None)
    if output is not None:
        by_name["token_embd.weight"] = output
    return list(by_name.items())


def _write(writer: "GGUFWriter", tensors: "list[tuple[str, ReaderTensor]]", path: Path, half: bool) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize, quantize

    bf16, f16 = GGMLQuantizationType.BF16, GGMLQuantizationType.F16
    kinds = {True: f16 if half else bf16, False: GGMLQuantizationType.F32}
    for name, tensor in tensors:
        shape = tensor.shape[::-1].tolist()  # GGUF lists the fastest axis first
        matrix = len(shape) > 1
        # The writer takes a shape in elements, but for uint8 in bytes: float32 here says "elements".
        writer.add_tensor_info(name, shape, np.dtype(np.float32), tensor.n_elements * (4 - 2 * matrix), kinds[matrix])
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors:
        try:
            values: Any = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            what = f"the number format of {tensor.name} cannot be read"
            raise ConfigError(what, got=tensor.tensor_type.name) from error
        rounded = quantize(values, bf16)
        exact = dequantize(rounded, bf16)
        if len(tensor.shape) == 1:
            writer.write_tensor_data(exact)
        elif not half:
            writer.write_tensor_data(rounded)
        else:
            with np.errstate(over="ignore"):
                stored = exact.astype(np.float16)
            if not np.array_equal(stored, exact):
                raise ConfigError(
                    f"float16 does not hold {name}", got=f"{np.abs(exact).max()} at most", fix="no --half"
                )
            writer.write_tensor_data(stored)
    writer.close()


def main(
    source: Annotated[Path, typer.Argument(metavar="IN.gguf", help="A GGUF file in any number format.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The bf16 file to write.")],
    tied: Annotated[
        bool, typer.Option("--tied", help="Use the output matrix as token embedding too, as a tied HF folder does.")
    ] = False,
    half: Annotated[bool, typer.Option("--half", help="Store the rounded values in float16, for OpenVINO.")] = False,
) -> None:
    """Write a bf16 GGUF file of the weights that a quantised one holds."""
    try:
        to_gguf(source, target, tied, half)
    except (PacelineError, OSError, ValueError, IndexError) as error:  # the last two: a file cut short
        raise SystemExit(f"Error: {error}") from error
    typer.echo(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    typer.run(main)
