"""Folders of models that a decoder refuses: each message names the folder, the fault and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvlab.engine import Decoder
from kvlab.errors import FormatError, MissingExtraError
from kvlab.lab.quality.model import SMOLLM2_FILE, require_smollm2
from tests.engine.models import LLAMA, family

WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "llama"
    family("llama").save_pretrained(folder)
    return folder


def changed(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **settings}))


def without(name: str) -> Callable[[Path], None]:
    def drop(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        del weights[name]
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return drop


def with_number(name: str, number: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        weights[name].view(-1)[-1] = number
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:5000])


def without_a_shard(folder: Path) -> None:
    shutil.rmtree(folder)
    family("llama").save_pretrained(folder, max_shard_size="100KB")
    sorted(folder.glob("model-*"))[1].unlink()


def only_gguf(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / WEIGHTS).rename(folder / "model.Q4_1.gguf")


def only_an_adapter(folder: Path) -> None:
    (folder / CONFIG).rename(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without("model.layers.0.mlp.up_proj.weight"), FormatError, "lacks weights: .*0.mlp.up_proj.* 1 in"),
        (without("lm_head.weight"), FormatError, "lacks weights: lm_head.weight"),
        (lambda folder: changed(folder, num_hidden_layers=3), FormatError, "lacks .*layers.2.* 9 in"),
        (lambda folder: changed(folder, intermediate_size=128), FormatError, "other sizes .*mlp.down_proj"),
        *(
            (with_number(name, number), FormatError, f": {name} is damaged: 1 of its .* NaN or inf.*fetch")
            for name, number in (
                ("model.embed_tokens.weight", np.nan),
                ("model.layers.0.self_attn.k_proj.weight", np.inf),
                ("model.layers.1.mlp.up_proj.weight", np.nan),
                ("model.layers.1.mlp.down_proj.weight", -np.inf),
                ("model.layers.1.input_layernorm.weight", np.nan),
                ("model.norm.weight", np.nan),
                ("lm_head.weight", np.nan),
            )
        ),
        (cut, FormatError, "damaged or cut off; fetch it again"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), FormatError, "damaged or cut off"),
        (without_a_shard, OSError, "no whole model .*model-00002-of-.*fetch the model again"),
        (lambda folder: (folder / WEIGHTS).unlink(), OSError, "no whole model .*no file named"),
        (lambda folder: (folder / CONFIG).unlink(), OSError, "no whole model .*no config.json"),
        (lambda folder: (folder / CONFIG).write_text("{"), OSError, "no whole model .*JSON"),
        (only_an_adapter, OSError, "adapter, which is to be merged"),
        (only_gguf, NotImplementedError, "Q4_1.gguf is in GGUF.*safetensors.*gguf_file=NAME.*pythia-14m"),
        (lambda folder: changed(folder, model_type="novel"), NotImplementedError, "'novel' .*gpt_neox"),
        (lambda folder: changed(folder, hidden_act="gelu"), NotImplementedError, "hidden_act='gelu'.*'silu'"),
        (
            lambda folder: changed(folder, quantization_config={"quant_method": "gptq", "bits": 4}),
            NotImplementedError,
            "quantised by gptq.* take the model that is not quantised",
        ),
    ],
)  # fmt: skip
def test_faulty_folders_are_refused(
    saved: Path, tmp_path: Path, change: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    change(folder)
    with pytest.raises(error, match=message) as refused:
        Decoder.from_pretrained(folder)
    assert str(refused.value).startswith(f"model_or_path={str(folder)!r}")


@pytest.mark.slow
def test_what_the_refusal_of_gguf_advises_works(tmp_path: Path) -> None:
    try:
        folder = require_smollm2()
    except MissingExtraError as error:
        pytest.skip(str(error))
    with pytest.raises(NotImplementedError, match=r"model.hf_quantizer = None; del model.config.q"):
        Decoder.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2_FILE)
    want = Decoder.from_pretrained(model, max_seqlen=8).prefill([5, 3, 8])
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(tmp_path)
    assert np.array_equal(Decoder.from_pretrained(tmp_path, max_seqlen=8).prefill([5, 3, 8]), want)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, num_local_experts=2))
    model.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="model_type='mixtral' is not supported"):
        Decoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 17}, "batch=17: a decoder has 1 to 16 rows"),
        ({"max_seqlen": 5000}, "max_seqlen=5000: .* take max_seqlen=64 or less"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"plan": "fast"}, "plan='fast'"),
        ({"cache_budget": "a lot"}, "cache_budget='a lot'"),
        ({"bits": 4}, "bits=4 .*give cache_budget"),
    ],
)
def test_options_are_checked_before_weights_are_read(
    saved: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr("kvlab.engine.decoder.from_seed", None)
    with pytest.raises(ValueError, match=message):
        Decoder.from_pretrained(saved, **options)
    with pytest.raises(ValueError, match=message.replace("=64", "=2048")):
        Decoder.from_config("pythia-14m", **options)


def test_damaged_biases_are_refused(tmp_path: Path) -> None:
    for name in ("attention.dense", "mlp.dense_4h_to_h", "post_attention_layernorm"):
        model = family("neox-parallel").half()
        with torch.no_grad():
            model.get_submodule(f"gpt_neox.layers.1.{name}").bias[3] = torch.nan
        model.save_pretrained(tmp_path)
        with pytest.raises(FormatError, match=f"gpt_neox.layers.1.{name}.bias is damaged: 1 of"):
            Decoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("key", ["_name_or_path", "name_or_path"])
def test_a_folder_is_read_whatever_name_it_keeps(saved: Path, tmp_path: Path, key: str) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    changed(tmp_path / "copy", **{key: "other/model"})
    found = Decoder.from_pretrained(tmp_path / "copy").prefill([1, 2])
    assert np.array_equal(found, Decoder.from_pretrained(saved).prefill([1, 2]))
    changed(tmp_path / "copy", model_type="mamba")
    with pytest.raises(NotImplementedError, match="copy"):
        Decoder.from_pretrained(tmp_path / "copy")


def test_the_configuration_is_read_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read_text = [], transformers.PreTrainedConfig._dict_from_json_file

    def counted(path: Any) -> Any:
        reads.append(Path(path).name)
        return read_text(path)

    monkeypatch.setattr(transformers.PreTrainedConfig, "_dict_from_json_file", counted)
    Decoder.from_pretrained(saved)
    assert reads.count(CONFIG) == 1


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.engine.options.gpus_missing_because", lambda: "there is none in this test")
    with pytest.raises(NotImplementedError, match="device='cuda': there is none in this test; device='cpu'"):
        Decoder.from_config("pythia-14m", device="cuda")
    monkeypatch.setattr("kvlab.engine.options.gpus_missing_because", lambda: None)
    monkeypatch.setattr("kvlab.engine.options.gpus", lambda: (None, None))
    with pytest.raises(
        ValueError, match=r"device='cuda:2': .* 2 GPUs, 'cuda:0' to 'cuda:1'.*CUDA_VISIBLE_DEV"
    ):
        Decoder.from_config("pythia-14m", device="cuda:2")


def test_a_folder_keeps_its_dtype(tmp_path: Path) -> None:
    family("llama", "bfloat16").bfloat16().save_pretrained(tmp_path)
    decoder = Decoder.from_pretrained(tmp_path)
    assert decoder.cache is not None
    assert decoder.cache.dtype == "bfloat16"


def test_dtypes_of_torch_and_numpy(saved: Path) -> None:
    want = Decoder.from_pretrained(saved, dtype="bfloat16").prefill([1, 2])
    assert np.array_equal(Decoder.from_pretrained(saved, dtype=torch.bfloat16).prefill([1, 2]), want)
    want = Decoder.from_pretrained(saved, dtype="float16").prefill([1, 2])
    for dtype in (np.float16, np.dtype("float16"), torch.float16):
        assert np.array_equal(Decoder.from_pretrained(saved, dtype=dtype).prefill([1, 2]), want)
    with pytest.raises(TypeError, match=r"dtype=torch.float32 must be one of 'float16', 'bfloat16'"):
        Decoder.from_pretrained(saved, dtype=torch.float32)
