"""The folder of a transformers model: what its configuration says, and the model with all its weights.

A configuration is small, and enough to refuse what the engine does not compute before any weight is read.
Readers of weights leave gaps: transformers draws what a file lacks at random and goes on, so what it reports
as missing is an error here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlab.device import translated_out_of_memory
from kvlab.engine.geometry import PUBLISHED, Geometry, check_family, geometry_of
from kvlab.engine.weights import dtype_of
from kvlab.errors import FormatError, needs_extra

__all__ = ["config_of", "load_model", "sizes_of"]

_KNOWN = (
    "random weights of known sizes come from Decoder.from_config, and from 'kvlab chat' and 'kvlab engine "
    f"check' by the names {', '.join(PUBLISHED)}"
)
_CONVERT = (
    "let transformers unpack it (with the packages gguf and accelerate): Decoder.from_pretrained takes model "
    "= AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME), and model.hf_quantizer = None; "
    "del model.config.quantization_config; model.save_pretrained(NEW) makes a folder, to which "
    "AutoTokenizer.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(NEW) adds the tokenizer"
)


def config_of(model: object) -> Any:
    """Read the configuration of a model from its folder or the Hugging Face cache; nothing is downloaded.

    Parameters
    ----------
    model : str or path

    Raises
    ------
    TypeError
        If it is neither.
    OSError
        If there is no model.
    NotImplementedError
        If its format, its architecture or its quantised weights are not supported.
    """
    with needs_extra("hf", "loading a model"):
        from transformers import AutoConfig, PreTrainedConfig
    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            f"model_or_path={model!r} must be a model of transformers with a head for causal language, its "
            f"folder or its name, not {type(model).__name__}"
        )
    name = os.fspath(model)
    _refuse_gguf(name)
    try:
        settings: dict[str, Any] = PreTrainedConfig.get_config_dict(name, local_files_only=True)[0]
    except OSError as error:
        is_folder = name and Path(name).is_dir()
        raise _incomplete(name, str(error).splitlines()[0]) if is_folder else _no_model(name) from error
    if "model_type" not in settings:
        is_adapter = Path(name, "adapter_config.json").exists()
        adapter = "; it holds an adapter, which is to be merged into its model" if is_adapter else ""
        raise _incomplete(name, f"it has no config.json with a model_type{adapter}")
    if settings["model_type"] == "mistral" and "layer_types" in settings:
        settings["model_type"] = "ministral"  # as transformers reads it
    with _named(name):
        check_family(settings["model_type"])
    if settings.get("quantization_config"):
        method = settings["quantization_config"].get("quant_method")
        raise NotImplementedError(
            f"model_or_path={name!r} has weights quantised by {method}, which the engine does not read; "
            "16-bit and float32 weights are supported: take the model that is not quantised, or use "
            "transformers"
        )
    own = {key: value for key, value in settings.items() if key not in ("name_or_path", "_name_or_path")}
    config = AutoConfig.for_model(**own)
    config.name_or_path = name  # of the folder, whatever name a file keeps
    return config


def sizes_of(model: object) -> Geometry:
    """Return the sizes of a model, from its configuration alone; errors as `config_of` and `geometry_of`.

    Parameters
    ----------
    model : str, path or transformers.PreTrainedConfig
        A configuration is what `config_of` has returned.
    """
    config = _config(model)
    with _named(config.name_or_path):
        return geometry_of(config)


def _config(model: Any) -> Any:
    return model if hasattr(model, "name_or_path") else config_of(model)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Let refusals say of which model they are."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        error.args = (f"model_or_path={name!r}: {error}",)
        raise


def load_model(model: object, dtype: Any = None) -> Any:
    """Load a transformers model from a folder or the Hugging Face cache, on the CPU; nothing is downloaded.

    Parameters
    ----------
    model : str, path or transformers.PreTrainedConfig
        As of `sizes_of`.
    dtype : {"float16", "bfloat16"}, optional
        By default that of the files.

    Raises
    ------
    TypeError, OSError, NotImplementedError
        As `config_of`; OSError also if a file of weights is missing.
    FormatError
        If a file of weights is damaged, or weights are missing or of other sizes.
    """
    wanted = "auto" if dtype is None else dtype_of(dtype)
    config = _config(model)
    import transformers

    name = config.name_or_path
    try:
        with translated_out_of_memory(f"the weights of {name!r}"):
            automatic: Any = transformers.AutoModelForCausalLM
            found, report = automatic.from_pretrained(
                name, config=config, dtype=wanted, local_files_only=True, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except OSError as error:
        raise _incomplete(name, str(error).splitlines()[0]) from error
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of safetensors, pickle, torch: each has its own
        raise FormatError(
            f"model_or_path={name!r}: its weights cannot be read, so a file is damaged or cut off; fetch it "
            f"again ({type(error).__name__}: {error})"
        ) from error
    missing = sorted(report["missing_keys"])
    others = sorted(str(key[0]) for key in report["mismatched_keys"])
    for faults, what in ((missing, "lacks weights"), (others, "has weights of other sizes than config.json")):
        if faults:
            raise FormatError(
                f"model_or_path={name!r} {what}: {', '.join(faults[:3])}{' ...' * (len(faults) > 3)}, "
                f"{len(faults)} in all; fetch the whole model of this config.json again"
            )
    return found.eval()


def _refuse_gguf(name: str) -> None:
    folder = Path(name)
    files = [folder] if folder.suffix.lower() == ".gguf" else sorted(folder.glob("*.gguf"))
    if not files or Path(folder, "config.json").exists():
        return
    what = "is" if files == [folder] else f"has no config.json, and {files[0].name} is"
    raise NotImplementedError(
        f"model_or_path={name!r} {what} in GGUF, which the engine does not read; supported is a folder of "
        "transformers: config.json, tokenizer and safetensors. Fetch the original with 'hf download NAME', "
        f"or {_CONVERT}; {_KNOWN}"
    )


def _no_model(name: str) -> OSError:
    if name in PUBLISHED:
        return OSError(
            f"model_or_path={name!r} is a known size, which Decoder.from_config draws and 'kvlab chat' talks "
            "with; a model with its own weights is a folder, or a name such as 'EleutherAI/pythia-160m' in "
            "the Hugging Face cache of this machine: 'hf download NAME' fetches one"
        )
    return OSError(
        f"model_or_path={name!r} is no folder of a model, nor the name of one in the Hugging Face cache of "
        "this machine (one with GGUF files alone is none); nothing is downloaded here: fetch the model with "
        f"'hf download NAME' first; {_KNOWN}"
    )


def _incomplete(name: str, reason: str) -> OSError:
    return OSError(
        f"model_or_path={name!r} is no whole model of transformers: {reason.rstrip('.')}. Supported are "
        "config.json and safetensors as save_pretrained or 'hf download NAME' writes them; fetch the "
        "model again"
    )
