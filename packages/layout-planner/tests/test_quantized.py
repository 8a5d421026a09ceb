"""Gathers of quantized tiles: bytes with whole tiles and with cut ones, and which of them pays."""

from typing import Any

import pytest

from layout_planner import Elements, Rows, TensorSpec, Tile, Whole, load_model, plan, plan_quantized


def llama_layer():
    group = max(load_model("llama-3-8b").groups, key=lambda g: g.count * g.numel)
    return [spec for spec in group.specs(Rows(1)) if len(spec.shape) > 1]


@pytest.mark.parametrize(
    ("tile", "ratios"),
    [
        ((128, 128), {8: 0.50, 32: 0.50, 64: 0.54, 128: 1.00, 256: 1.69, 1024: 5.54}),
        ((32, 32), {8: 0.50, 32: 0.50, 64: 0.50, 128: 0.50, 256: 0.54, 1024: 1.70}),
    ],
)
def test_a_band_outgrows_the_shards_of_many_ranks_and_cut_tiles_do_not(tile, ratios):
    for world_size, ratio in ratios.items():
        found = plan_quantized(llama_layer(), world_size, tile)
        assert found.whole_bytes / found.bf16_bytes == pytest.approx(ratio, abs=0.006)
        assert found.shared_bytes <= 0.51 * found.bf16_bytes
        assert found.cut == ("whole" if ratio <= 0.55 else "shared")
        assert found.bytes_of(found.cut) <= 0.55 * found.bf16_bytes
        assert found.layout() is (found.whole if found.cut == "whole" else found.shared)


def by_hand(layout, tile):
    """Bytes of a gather, counted tile by tile."""
    most = 0
    for rank in range(layout.world_size):
        held = set()
        for spec in layout.tensors:
            *_, rows, columns = spec.shape
            start, stop = layout.local_range(spec.name, rank)
            for row in range(start // columns, -(-stop // columns)):
                for column in range(0, columns, tile[1]):
                    held.add((spec.name, row // rows, row % rows // tile[0], column))
        most = max(most, len(held))
    return layout.padded_numel + layout.world_size * -(-4 * most // 16) * 16


def test_bytes_are_those_counted_tile_by_tile():
    group = [TensorSpec("a", (70, 50)), TensorSpec("b", (3, 45, 33)), TensorSpec("c", (16, 16), Rows(4))]
    tile: tuple[int, int]
    for world_size in (1, 2, 3, 5):
        for tile in [(32, 32), (1, 16), (8, 128)]:
            found = plan_quantized(group, world_size, tile)
            assert found.whole_bytes == by_hand(found.whole, tile)
            assert found.shared_bytes == by_hand(found.shared, tile)
            assert found.bf16_bytes == 2 * plan(group, world_size).padded_numel
            if tile[0] == 1:
                assert found.whole is found.shared
                assert (found.cut, found.amax_bytes) == ("whole", 0)


def test_only_tiles_that_a_rank_boundary_cuts_share_their_magnitude():
    found = plan_quantized([TensorSpec("a", (256, 320))], 4, (128, 128))
    assert found.shared.local_range("a", 0) == (0, 64 * 320)
    assert found.amax_bytes == 4 * 2 * 3  # both bands are cut, in three tiles each


def test_bands_of_tiles_meet_the_blocks_of_the_tensors():
    group = [TensorSpec("a", (480, 16), Rows(48)), TensorSpec("b", (96, 16), Whole())]
    group.append(TensorSpec("c", (64, 16), Elements(64)))
    found = plan_quantized(group, 2, (32, 32))
    assert [spec.block for spec in found.whole.tensors] == [Tile(96, 32), Whole(), Tile(32, 32)]
    assert [spec.block for spec in found.shared.tensors] == [Rows(48), Whole(), Elements(64)]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (TensorSpec("norm", (64,)), "norm: a tensor of shape"),
        (TensorSpec("w", (64, 48), Elements(16)), "w: its block elements:16 ends inside a row of 48"),
        (TensorSpec("e", (80, 16), Rows(1), 40 * 16), "e: blocks start over after 640 elements"),
    ],
)
def test_a_tensor_that_cannot_be_served_is_named(spec, said):
    with pytest.raises(ValueError, match=said):
        plan_quantized([spec], 2, (32, 32))


def test_bad_arguments_are_named():
    cut: Any = "rows"
    group = [TensorSpec("w", (64, 48))]
    with pytest.raises(ValueError, match="tile"):
        plan_quantized(group, 2, (0, 32))
    with pytest.raises(ValueError, match="cut: expected"):
        plan_quantized(group, 2, (32, 32)).layout(cut)
