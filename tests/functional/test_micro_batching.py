"""Batches cut into parts and outputs put together again."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from lightning_tricks.functional.micro_batching import join_outputs, num_samples, parts_needed, split_batch
from tests.micro_batching_cases import CONTAINERS, EXTRAS, Pair, Record, build, leaves

structures = st.lists(st.sampled_from(sorted(CONTAINERS)), min_size=1, max_size=4)


def types(batch) -> list[type]:
    if isinstance(batch, list) and all(isinstance(one, str) for one in batch):
        return [type(batch)]  # one entry a sample
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else []
    inside = [batch.inputs, batch.rest] if isinstance(batch, Record) else inside
    return [type(batch), *(kind for one in inside for kind in types(one))]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(structure=structures, extra=st.sampled_from(sorted(EXTRAS)), samples=st.integers(2, 9), data=st.data())
def test_the_parts_are_the_batch(structure, extra, samples: int, data) -> None:
    num_parts = data.draw(st.integers(1, samples))
    x, y = torch.randn(samples, 3, 2), torch.arange(samples)
    batch = build(structure, extra, x, y)
    parts, sizes = split_batch(batch, num_parts)
    assert num_samples(batch) == samples
    assert len(parts) == num_parts
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    tensors = [[one for one in leaves(part) if isinstance(one, torch.Tensor)] for part in parts]
    assert torch.equal(torch.cat([one[0] for one in tensors]), x)
    assert torch.equal(torch.cat([one[-1] for one in tensors]), y)
    assert all(one[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for one in tensors)  # views
    for part in parts:
        assert types(part) == types(batch)
    words = [[one for one in leaves(part) if isinstance(one, str)] for part in parts]
    if words[0]:
        assert [len(one) for one in words] == [size * (len(structure) - 1) for size in sizes]


def test_parts_needed_and_their_sizes() -> None:
    assert [parts_needed(n, 4) for n in (0, 1, 4, 5, 9)] == [1, 1, 1, 2, 3]
    assert split_batch(torch.arange(10), 4)[1] == [3, 3, 2, 2]


def test_what_belongs_to_all_samples_goes_to_every_part() -> None:
    batch = {"x": torch.zeros(4, 2), "mask": torch.ones(1, 2), "scale": torch.tensor(2.0), "name": "train", "k": 3}
    for part in split_batch(batch, 2)[0]:
        assert len(part["x"]) == 2
        assert part["mask"] is batch["mask"]
        assert part["scale"] is batch["scale"]
        assert (part["name"], part["k"]) == ("train", 3)


def test_images_of_different_sizes_and_their_targets() -> None:
    images = [torch.zeros(3, size, size) for size in (4, 5, 6)]
    targets = [{"boxes": torch.zeros(n, 4)} for n in (2, 0, 7)]
    batch = (images, targets)
    assert num_samples(batch) == 3
    (first, second), sizes = split_batch(batch, 2)
    assert sizes == [2, 1]
    assert [len(one) for one in first] == [2, 2]
    assert second[0][0] is images[2]
    assert second[1][0] is targets[2]


def test_arrays_and_mappings_of_other_kinds() -> None:
    batch = defaultdict(list, x=torch.zeros(4), array=np.arange(4), number=np.float32(1.0))
    (first, _), _ = split_batch(batch, 2)
    assert isinstance(first, defaultdict)
    assert first["missing"] == []
    assert first["array"].tolist() == [0, 1]
    assert first["number"] == 1.0
    encoding = split_batch(BatchEncoding({"ids": torch.zeros(4, 2)}), 4)[0][0]
    assert isinstance(encoding, BatchEncoding)
    assert encoding.ids.shape == (1, 2)
    assert isinstance(split_batch(OrderedDict(x=torch.zeros(2)), 2)[0][0], OrderedDict)
    assert split_batch(Pair(torch.zeros(2), None), 2)[0][1].second is None


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ({"x": torch.zeros(4), "y": torch.zeros(3)}, ValueError, r"x: 4, y: 3 in dict\(x=Tensor\[4\], y=Tensor\[3\]\)"),
        ([1, 2], TypeError, r"at least one tensor .* got list\(int, int\)"),
        (torch.tensor(1.0), TypeError, r"at least one tensor .* got Tensor\[\]"),
        ({"x": torch.zeros(4), "other": object()}, TypeError, "got object at other: it cannot be cut"),
        ({"x": torch.zeros(4), "size": (8, 8)}, ValueError, r"each of 4 samples, got a tuple of 2 at size"),
        ((pack_sequence([torch.zeros(2), torch.zeros(1)]), torch.zeros(2)), TypeError, "got PackedSequence.* at 0"),
    ],
)
def test_what_cannot_be_cut_shows_what_it_is(batch, error, words: str) -> None:
    with pytest.raises(error, match=words):
        split_batch(batch, 2)


def test_outputs_are_joined_by_what_they_are() -> None:
    outputs = [
        {
            "logits": torch.ones(2, 3),
            "loss2": torch.tensor(1.0),
            "f": 1.0,
            "names": ["a", "b"],
            "n": (torch.ones(2), 1),
        },
        {"logits": torch.zeros(1, 3), "loss2": torch.tensor(4.0), "f": 4.0, "names": ["c"], "n": (torch.ones(1), 1)},
    ]
    joined = join_outputs(outputs, [2 / 3, 1 / 3], [2, 1])
    assert joined["logits"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert joined["loss2"].item() == joined["f"] == 2.0
    assert joined["names"] == ["a", "b", "c"]
    assert joined["n"][0].shape == (3,)
    assert joined["n"][1] == 1


@pytest.mark.parametrize("pair", [(object(), object()), (torch.ones(5), torch.ones(5)), ("a", "b"), (3, 2)])
def test_of_what_cannot_be_joined_there_is_a_list(pair) -> None:
    joined = join_outputs(pair, [0.5, 0.5], [2, 2])
    assert type(joined) is list
    assert all(one is other for one, other in zip(joined, pair, strict=True))


def test_images_that_could_be_read_in_two_ways_are_refused() -> None:
    images = [torch.zeros(3, 8, 8) for _ in range(5)]
    boxes = [{"box": torch.zeros(1, 4)} for _ in range(5)]
    with pytest.raises(
        ValueError, match=r"read in one way.* the 3 of the tensors' first dimension or the 5 of the lists"
    ):
        num_samples((images, boxes))
    assert num_samples((images, boxes, torch.zeros(5))) == 5
    assert num_samples({"pair": [torch.zeros(4, 2), torch.zeros(4)]}) == 4
