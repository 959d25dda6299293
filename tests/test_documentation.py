"""Every example in a docstring runs, and every public thing has a docstring with one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import lightning_tricks

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(lightning_tricks.__path__, "lightning_tricks.")
    if "__main__" not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": __import__("torch"), "nn": __import__("torch").nn})
    assert results.failed == 0


@pytest.mark.parametrize("name", [name for name in MODULES if ".functional." in name])
def test_public_functions_of_layer_0_have_an_example(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isfunction(thing):
            documentation = inspect.getdoc(thing)
            assert ">>>" in documentation or public == "restore_random_state_", public
            if inspect.signature(thing).parameters:
                assert "Args:" in documentation, public


@pytest.mark.parametrize("name", lightning_tricks.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(lightning_tricks, name))


@pytest.mark.parametrize("name", [n for n in lightning_tricks.__all__ if n not in ("Trick",)])
def test_tricks_say_what_they_buy_and_cost(name: str) -> None:
    thing = getattr(lightning_tricks, name)
    if inspect.isclass(thing) and issubclass(thing, lightning_tricks.Trick):
        assert thing.buys
        assert thing.costs
        assert thing.job
        assert "Cost:" in inspect.getdoc(thing)
        assert ">>>" in inspect.getdoc(thing)
        assert len(inspect.signature(thing).parameters) <= 8
        assert not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(thing).parameters.values())
