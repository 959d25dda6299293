import pytest
from torch import nn

from lightning_tricks.functional.exclusion import excluded_parameters, find_head


class Classifier(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


@pytest.mark.parametrize(
    ("layers", "head"),
    [
        ({"body": nn.Linear(2, 2), "out": nn.Linear(2, 2)}, "out"),
        ({"head": nn.Linear(2, 2), "extra": nn.Linear(2, 2)}, "head"),
        ({"fc": nn.Linear(2, 2), "extra": nn.Linear(2, 2)}, "fc"),
        ({"classifier": nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), "extra": nn.Linear(2, 2)}, "classifier.1"),
        ({"a": Classifier(fc=nn.Linear(2, 2)), "b": Classifier(fc=nn.Linear(2, 2)), "c": nn.Linear(2, 2)}, "c"),
        ({"conv": nn.Conv2d(1, 1, 1)}, None),
    ],
)
def test_the_head(layers: dict, head: str | None) -> None:
    assert find_head(Classifier(**layers)) == head


def test_by_class_name_glob_and_list() -> None:
    model = Classifier(a=nn.Linear(2, 2), norm=nn.LayerNorm(2), b=nn.Linear(2, 2))
    assert excluded_parameters(model, ()) == set()
    assert excluded_parameters(model, nn.LayerNorm) == excluded_parameters(model, "LayerNorm")
    assert excluded_parameters(model, nn.LayerNorm) == {"norm.weight", "norm.bias"}
    assert excluded_parameters(model, ["head", "*.bias"]) == {"b.weight", "b.bias", "a.bias", "norm.bias"}


def test_what_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"matches 'decoder\.\*'; the module types there are: Linear \(1\)"):
        excluded_parameters(Classifier(a=nn.Linear(2, 2)), "decoder.*")
    with pytest.raises(TypeError, match="got 3"):
        excluded_parameters(nn.Linear(2, 2), 3)


def test_a_tied_head_is_excluded_under_all_its_names() -> None:
    model = Classifier(table=nn.Embedding(4, 2), body=nn.Linear(2, 2), head=nn.Linear(2, 4, bias=False))
    model.head.weight = model.table.weight
    assert excluded_parameters(model, "head") == {"head.weight", "table.weight"}
    assert excluded_parameters(model, "head*") == {"head.weight", "table.weight"}
