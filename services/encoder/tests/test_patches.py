import pytest

from services.encoder.patches import (
    PatchConfig,
    cache_key,
    image_load,
    pack_batches,
    pick_card,
    plan_geometry,
)

NO_MINIMUM = PatchConfig(min_pixels=0)


@pytest.mark.parametrize(
    ("size", "planned", "vit", "llm", "tokens"),
    [
        ((640, 480), (644, 490), (46, 35), (16, 12), 206),
        ((1920, 1080), (1708, 966), (122, 69), (41, 23), 968),
        ((4000, 3000), (1512, 1134), (108, 81), (36, 27), 1001),
        ((42, 42), (42, 42), (3, 3), (1, 1), 4),
        ((100, 5000), (112, 5012), (8, 358), (3, 120), 482),
        ((14, 14), (14, 14), (1, 1), (1, 1), 4),
    ],
)
def test_the_worked_examples_of_6_1(size, planned, vit, llm, tokens):
    plan = plan_geometry(*size, NO_MINIMUM)
    assert (plan.width, plan.height) == planned
    assert (plan.vit_width, plan.vit_height) == vit
    assert (plan.llm_width, plan.llm_height) == llm
    assert plan.num_tokens == tokens


def test_load_counts_planned_patches_and_raw_ones_on_request():
    assert image_load(4000, 3000, NO_MINIMUM) == 8748
    assert image_load(4000, 3000, NO_MINIMUM, raw=True) == 61490


def test_ur_77_no_size_ever_exceeds_the_token_limit():
    for config in (NO_MINIMUM, PatchConfig(), PatchConfig(max_tokens=64, min_pixels=7056)):
        for width in (1, 7, 13, 42, 100, 999, 4096, 16383):
            for height in (1, 5, 41, 77, 640, 3333, 16383):
                plan = plan_geometry(width, height, config)
                assert plan.num_tokens <= config.max_tokens
                assert plan.width % config.patch == plan.height % config.patch == 0
                assert plan.width > 0
                assert plan.height > 0


def test_a_planned_size_plans_to_itself():
    for size in ((3001, 17), (17, 3001), (1234, 4321), (9, 9)):
        plan = plan_geometry(*size, PatchConfig())
        assert plan_geometry(plan.width, plan.height, PatchConfig()) == plan


def test_t_vis_1_goes_to_the_card_with_the_fewest_patches():
    cards = [5000, 3900, 4100, 3900]
    first = image_load(1024, 768, NO_MINIMUM)
    assert first == 4070
    assert pick_card(cards) == 1
    cards[1] += first
    assert cards[1] == 7970
    assert image_load(448, 448, NO_MINIMUM) == 1024
    assert pick_card(cards) == 3


def test_the_key_depends_on_everything_that_decides_the_embedding():
    base = ("w", "p", PatchConfig(), 10, 20, b"image")
    keys = {
        cache_key(*base),
        cache_key("w2", *base[1:]),
        cache_key("w", "p2", *base[2:]),
        cache_key("w", "p", PatchConfig(max_tokens=64), 10, 20, b"image"),
        cache_key("w", "p", PatchConfig(), 20, 10, b"image"),
        cache_key("w", "p", PatchConfig(), 10, 20, b"other"),
        cache_key("wp", "", *base[2:]),
    }
    assert len(keys) == 7


def test_batches_keep_order_and_stay_within_the_limit():
    assert pack_batches([4, 4, 4, 20, 1, 1], max_patches=8) == [[0, 1], [2], [3], [4, 5]]
    assert pack_batches([], max_patches=8) == []


def test_an_image_without_area_is_refused():
    with pytest.raises(ValueError, match="no area"):
        plan_geometry(0, 10, PatchConfig())
