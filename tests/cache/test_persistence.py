"""Saved caches: exact round trips, and FormatError for every damage."""

import json
import math
import stat

import numpy as np
import pytest

from kvlab import files
from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import FormatError


def filled(layers=2, seed=0, **options):
    rng = np.random.default_rng(seed)
    options = {"budget": 0.4, "plan_length": 200, "batch": 2, "bits": (2, "k4v2", 8), **options}
    cache = MixedPrecisionCache(layers, 4, 2, 32, **options)
    for n in (100, 64, 7):
        q = rng.standard_normal((cache.batch, n, 4, 32), dtype=np.float32)
        k, v = rng.standard_normal((2, cache.batch, n, 2, 32), dtype=np.float32)
        valid = np.ones((cache.batch, n), bool)
        valid[-1, : n // 2] = n != 100
        for layer in range(layers):
            cache.step(layer, q, k, v, valid=valid)
    return cache


def go_on(cache):
    rng = np.random.default_rng(99)
    q = rng.standard_normal((cache.batch, 70, 4, 32), dtype=np.float32)
    k, v = rng.standard_normal((2, cache.batch, 70, 2, 32), dtype=np.float32)
    return [cache.step(layer, q, k, v) for layer in range(cache.num_layers) for _ in range(2)]


@pytest.mark.parametrize(
    "options",
    [{}, {"residual": 5, "budget": 1.2}, {"dtype": "bfloat16", "bits": (4, 16)}, {"budget": "1MiB"}],
)
def test_a_loaded_cache_goes_on_as_the_saved_one_would(tmp_path, options):
    cache = filled(**options)
    cache.save(tmp_path / "cache")
    loaded = MixedPrecisionCache.load(tmp_path / "cache")
    assert (loaded.nbytes, loaded.seqlen, loaded.budget_nbytes) == (cache.nbytes, 171, cache.budget_nbytes)
    for one, other in zip(go_on(cache), go_on(loaded), strict=True):
        np.testing.assert_array_equal(one, other)
    for name, pages in cache.allocation().items():
        np.testing.assert_array_equal(pages, loaded.allocation()[name])
    assert [path.name for path in tmp_path.iterdir()] == ["cache"], "a temporary file was left"


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(("n", "waiting"), [(0, 0), (60, 2), (100, 1), (104, 0)])
def test_all_that_a_file_holds_of_pages_and_frames_counts(tmp_path, n, waiting, in_blocks):
    """Tokens that wait for the frame of their keys, and sums of queries that wait with them, too."""
    rng, path, dim = np.random.default_rng(0), tmp_path / "cache", 64 if in_blocks else 32
    bits = {"bits": ("k4220v2", "k8444v4", 8)} if in_blocks else {}
    cache = MixedPrecisionCache(2, 4, 2, dim, batch=2, budget="1MiB", **bits)
    q, k, v = (rng.standard_normal((2, n, heads, dim), dtype=np.float32) for heads in (4, 2, 2))
    for layer in range(2):
        cache.step(layer, q, k, v, valid=np.arange(n) >= np.array([[0], [min(n, 40)]]))
    cache.save(path)
    in_frames = ".k_mean", ".k_shift", ".exponent", ".k_order", ".k_gain", ".k_ratio"
    counted = (".num_pages", *in_frames, ".query_sums")
    arrays = files.read(path)[1]
    tables = sum(8 * len(x) for name, x in arrays.items() if ".pool" in name)
    rest = sum(x.nbytes for name, x in arrays.items() if name.endswith(counted) or ".pool" in name)
    assert cache.nbytes == tables + rest
    assert len(arrays["0.query_sums"]) == waiting, "those of other rows are not needed any more"
    assert arrays["0.query_sums"].any() == (waiting > 0)


def test_an_empty_cache_too(tmp_path):
    MixedPrecisionCache(1, 2, 1, 16, batch=0).save(tmp_path / "cache")
    assert MixedPrecisionCache.load(tmp_path / "cache").nbytes == 0


def test_the_file_is_read_by_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    cache = filled()
    cache.save(tmp_path / "cache")
    arrays = safetensors.load_file(tmp_path / "cache")
    np.testing.assert_array_equal(arrays["1.k_mean"], cache.pages(1).k_mean)


def test_a_function_cannot_be_saved(tmp_path):
    cache = MixedPrecisionCache(1, 2, 1, 16, importance=lambda previous, mass, positions, seqlen: mass)
    with pytest.raises(NotImplementedError, match="function"):
        cache.save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "cache"
    cache = MixedPrecisionCache(1, 2, 1, 16, bits=(4,), budget=None)
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 1, 70, 1, 16), dtype=np.float32)
    cache.append(0, k, v)
    cache.save(path)
    return path


def refused(path, data):
    path.write_bytes(data)
    with pytest.raises(FormatError):
        MixedPrecisionCache.load(path)


def test_truncation_at_every_byte(small, tmp_path):
    data = small.read_bytes()
    for size in range(len(data)):
        refused(tmp_path / "cache", data[:size])
    refused(tmp_path / "cache", data + b"\0")


def test_every_bit_of_the_header_and_many_of_the_body(small):
    data = small.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(2)
    places = [*range(8 * header), *(8 * header + rng.integers(0, 8 * (len(data) - header), 2000))]
    for place in places:
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(FormatError):
            files.parse(bytes(damaged))


def rewritten(path, change):
    """The file with its arrays and description changed, and a checksum that fits."""
    description, arrays = files.read(path)
    change(description, arrays)
    files.write(path, description, arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda d, a: d.update(version=1),
        lambda d, a: d["arguments"].update(bits=[5]),
        lambda d, a: d["arguments"].update(num_layers=(1 << 31) - 1),
        lambda d, a: d["arguments"].update(batch=(1 << 31) - 1),
        lambda d, a: d["arguments"].update(num_heads_q=1 << 30, num_heads_kv=1 << 30),
        lambda d, a: d["arguments"].update(budget=1),
        lambda d, a: d["arguments"].update(device="cuda"),
        lambda d, a: d.update(layers=[]),
        lambda d, a: d.update(arguments=[]),
        lambda d, a: d["layers"][0].update(seqlen=-1),
        lambda d, a: d["layers"][0].update(seqlen=math.inf),
        lambda d, a: d["layers"][0].update(seqlen=9),
        lambda d, a: d["layers"][0].update(since_collection=-1),
        lambda d, a: a["0.base"].fill(1),
        lambda d, a: d["arguments"].update(head_dim=32),
        lambda d, a: d["arguments"].update(nonsense=1),
        lambda d, a: d["arguments"].pop("head_dim"),
        lambda d, a: d["layers"].append({}),
        lambda d, a: d["layers"][0].pop("seqlen"),
        lambda d, a: a["0.rung"].fill(7),
        lambda d, a: a["0.count"].fill(17),
        lambda d, a: a["0.count"].fill(0),
        lambda d, a: a["0.num_pages"].fill(-1),
        lambda d, a: a["0.num_pages"].fill(1 << 30),
        lambda d, a: a.pop("0.pool0"),
        lambda d, a: a.update({"0.pool0": a["0.pool0"][:1]}),
        lambda d, a: a.update({"0.k_mean": a["0.k_mean"].astype(np.float32)}),
        lambda d, a: a.update({"0.k_shift": a["0.k_shift"].astype(np.int32)}),
        lambda d, a: a.pop("0.query_sums"),
        lambda d, a: a.update({"extra": np.zeros(3, np.uint8)}),
    ],
)
def test_contents_that_do_not_fit(small, tmp_path, change):
    path = tmp_path / "cache"
    path.write_bytes(small.read_bytes())
    rewritten(path, change)
    with pytest.raises(FormatError):
        MixedPrecisionCache.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d, a: d["layers"][0].update(seqlen=1 << 63),
        lambda d, a: d["layers"][0].update(seqlen=1 << 31),
        lambda d, a: d["layers"][0].update(since_collection=1 << 63),
        lambda d, a: a["0.k_mean"].fill(np.nan),
        lambda d, a: a["0.k_mean"].fill(np.inf),
        lambda d, a: a["0.k_shift"].fill(15),
        lambda d, a: d["layers"][0].update(lookahead=-1),
        lambda d, a: d["layers"][0].pop("without_holes"),
        lambda d, a: a["0.pool4"].fill(255),  # positions of the window
        lambda d, a: a["0.open"].fill(60),
        lambda d, a: a["0.open"].fill(-2),
        lambda d, a: a["0.has_mean"].fill(False),
    ],
)
def test_contents_that_a_later_call_would_stumble_over(tmp_path, change):
    path, cache = tmp_path / "cache", MixedPrecisionCache(1, 2, 1, 16, residual=8, plan_length=400)
    cache.append(0, *np.random.default_rng(1).standard_normal((2, 1, 70, 1, 16), dtype=np.float32))
    cache.save(path)
    MixedPrecisionCache.load(path)
    rewritten(path, change)
    with pytest.raises(FormatError):
        MixedPrecisionCache.load(path)


@pytest.mark.parametrize("mixed", [False, True])
def test_tables_that_plans_would_not_find_their_way_in(tmp_path, mixed):
    """Rungs from high to low, and a quad of two rungs: plans go by sorted tables in whole quads."""
    path, cache = tmp_path / "cache", MixedPrecisionCache(1, 2, 1, 32, budget=0.3, plan_length=400)
    cache.append(0, *np.random.default_rng(1).standard_normal((2, 1, 400, 1, 32), dtype=np.float32))
    cache.save(path)

    def change(_, arrays):
        rung, count = arrays["0.rung"], arrays["0.count"]
        if mixed:
            filler = np.flatnonzero((count[:-1] == 0) & (rung[1:] > rung[:-1]))[0]
            rung[filler] = rung[filler + 1]
        else:
            arrays["0.rung"], arrays["0.count"] = rung[::-1].copy(), count[::-1].copy()

    rewritten(path, change)
    with pytest.raises(FormatError, match="page tables are not sorted by rung in quads"):
        MixedPrecisionCache.load(path)


@pytest.mark.parametrize("opens", [False, True])
def test_entries_behind_the_pages_of_waiting_tokens_name_none(tmp_path, opens):
    """The five pages have eight entries; a page of a sixth would lie where those of another head do."""
    path, cache = tmp_path / "cache", MixedPrecisionCache(1, 2, 1, 16, bits=(4,), budget=None)
    cache.append(0, *np.ones((2, 1, 40, 1, 16), np.float32))
    cache.save(path)

    def change(_, arrays):
        assert len(arrays["0.count"]) == 8
        assert len(arrays["0.pool1"]) == 5
        if opens:
            arrays["0.open"][0, 0, 1] = 5
        else:
            arrays["0.count"][5] = 1
        arrays["0.pool1"] = np.concatenate([arrays["0.pool1"], arrays["0.pool1"][:1]])

    rewritten(path, change)
    with pytest.raises(FormatError, match="pages of tokens that wait are in rows that have their mean, or"):
        MixedPrecisionCache.load(path)


def test_files_of_other_versions_are_refused_by_their_number(small, tmp_path):
    path = tmp_path / "cache"
    path.write_bytes(small.read_bytes())
    rewritten(path, lambda d, a: d.update(version=9))
    with pytest.raises(FormatError, match="format version 9; this kvlab reads version 10 alone: fill a"):
        MixedPrecisionCache.load(path)


@pytest.mark.parametrize("seed", range(4))
def test_results_do_not_depend_on_how_long_the_tables_have_grown(tmp_path, seed):
    """A loaded cache has a page table without unused entries; the bits of its results are the same."""
    rng = np.random.default_rng(seed)
    cache = MixedPrecisionCache(1, 2, 1, 32, budget=None, bits=(4, 8), residual=0)
    for n in (4000, 130):
        cache.append(0, *rng.standard_normal((2, 1, n, 1, 32), dtype=np.float32))
    cache.save(tmp_path / "cache")
    loaded = MixedPrecisionCache.load(tmp_path / "cache")
    for rows in (1, 40):
        q = rng.standard_normal((1, rows, 2, 32), dtype=np.float32)
        np.testing.assert_array_equal(cache.attend(0, q), loaded.attend(0, q))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_file_that_is_there_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "cache"
    path.write_bytes(b"old")
    path.chmod(mode)
    MixedPrecisionCache(1, 2, 1, 16).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    MixedPrecisionCache.load(path)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_replaced(tmp_path, exists):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target, link = folder / "target", tmp_path / "link"
    link.symlink_to(target)
    if exists:
        target.write_bytes(b"old")
    MixedPrecisionCache(1, 2, 1, 16).save(link)
    assert link.is_symlink()
    MixedPrecisionCache.load(target)
    assert [path.name for path in folder.iterdir()] == ["target"]


def test_names_may_be_as_long_as_the_file_system_has_them(tmp_path):
    path = tmp_path / ("n" * 255)
    MixedPrecisionCache(1, 2, 1, 16).save(path)
    MixedPrecisionCache.load(path)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"null"]
)
def test_other_files(tmp_path, data):
    refused(tmp_path / "cache", data)


def test_deep_nesting_is_refused(tmp_path):
    header = ('{"__metadata__":' + "[" * 100_000).encode()
    refused(tmp_path / "cache", len(header).to_bytes(8, "little") + header)


def test_a_failed_write_leaves_the_old_file(small, tmp_path, monkeypatch):
    path = tmp_path / "cache"
    path.write_bytes(small.read_bytes())
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        MixedPrecisionCache(1, 2, 1, 16).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_a_gpu_that_does_not_do_what_a_file_holds_is_no_fault_of_the_file(tmp_path):
    path = tmp_path / "cache"
    filled().save(path)
    with pytest.raises(NotImplementedError, match=r"head_dim=32 is not supported on a GPU, .* device='cpu'"):
        MixedPrecisionCache.load(path, device="cuda")
    description, arrays = files.read(path)
    files.write(path, description, {name: array for name, array in arrays.items() if name != "1.open"})
    with pytest.raises(FormatError):
        MixedPrecisionCache.load(path, device="cuda")


def test_layers_of_different_lengths_are_not_saved(tmp_path):
    cache, x = MixedPrecisionCache(2, 2, 1, 32, budget=None), np.ones((1, 3, 1, 32), np.float32)
    cache.append(0, x, x)
    with pytest.raises(ValueError, match=r"layers hold different numbers of tokens, \[0, 3\]"):
        cache.save(tmp_path / "cache")
    cache.append(1, x, x)
    cache.save(tmp_path / "cache")


def test_the_header_says_what_it_is(small):
    data = small.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert json.loads(header["__metadata__"]["kvlab"])["arguments"]["head_dim"] == 16
