"""What users of a strategy do besides plain training."""

import pytest
import torch

import lightning_tricks as lt
from tests import behaviour_cases as cases
from tests.models import assert_same

all_strategies = pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero1"])


@all_strategies
def test_manual_optimization_and_several_optimizers(strategy: str, two_processes) -> None:
    two_processes.run(cases.manual_optimization, strategy)


def test_micro_batches_without_a_loss(one_process) -> None:
    one_process.run(cases.no_loss_on_one_rank)


@all_strategies
def test_evaluation_before_between_and_after_fits(strategy: str, two_processes) -> None:
    two_processes.run(cases.evaluation, strategy)


def test_nothing_runs_under_inference_mode(two_processes) -> None:
    two_processes.run(cases.inference_mode_before_fit)


@all_strategies
def test_weights_may_change_between_forwards(strategy: str, two_processes) -> None:
    two_processes.run(cases.weights_that_change_between_forwards, strategy)


@all_strategies
def test_case_27_an_average_of_shards_is_that_of_the_weights(strategy: str, two_processes) -> None:
    two_processes.run(cases.case_27_average, strategy)


@all_strategies
def test_logged_shards_and_metrics_are_global(strategy: str, two_processes) -> None:
    two_processes.run(cases.logging_of_shards, strategy)


def test_case_23_a_module_without_configure_model_trains(two_processes) -> None:
    assert "configure_model" not in vars(cases.Net)
    two_processes.run(cases.check, cases.Net)


def test_case_25_ranks_seeded_differently_become_equal(four_processes) -> None:
    ranks = four_processes.run(cases.differently_seeded, lt.FSDP2Strategy(replicate_size=2))
    for rank in ranks:
        assert_same(rank, ranks[0])


def test_case_25_on_two_ranks_it_is_rank_0s_run(two_processes) -> None:
    for strategy in ("fsdp2", "zero1"):
        ranks = two_processes.run(cases.differently_seeded, strategy)
        want = cases.differently_seeded("one process")
        for rank in ranks:
            assert_same(rank, want, rtol=0, atol=1e-6)


def test_a_model_on_meta_gets_the_weights_of_one_process(two_processes) -> None:
    two_processes.run(cases.meta_initialization)


def test_an_empty_module_is_filled(two_processes) -> None:
    two_processes.run(cases.empty_init)


def test_weights_come_straight_from_a_file(two_processes, tmp_path) -> None:
    two_processes.run(cases.weights_from_a_file, str(tmp_path / "weights.pt"))


def test_precisions(two_processes) -> None:
    found = two_processes.run(cases.precisions)[0]
    for name in ("autocast", "autocast by name", "fp16 scaler", "policy", "true"):
        one, ours = found[f"{name}, one"], found[f"{name}, ours"]
        difference = max(float((ours[key] - one[key]).abs().max()) for key in ours if key.startswith("net."))
        assert difference < 2e-2  # of weights up to 0.5, after 10 steps in 8 or 11 bits
        if name not in ("policy", "true"):
            assert ours["dtypes"] == one["dtypes"]
    for name, batch in (("policy, BatchNorm", "float32"), ("true, BatchNorm", "bfloat16")):
        dtypes = found[f"{name}, ours"]["dtypes"]
        assert dtypes["linear"] == dtypes["linear input"] == dtypes["head"] == "torch.bfloat16"
        assert dtypes["norm"] == "torch.float32"
        assert dtypes["batch"] == f"torch.{batch}"  # of the targets
        assert found[f"{name}, ours"]["net.0.norm.running_mean"].dtype == torch.float32
    assert found["true, ours"]["net.0.linear.weight"].dtype == torch.bfloat16
    assert found["policy, ours"]["net.0.linear.weight"].dtype == torch.float32


EXPECTED = {
    "tied": "ValueError: found no 'embedding' in TiedModule; .*Block",
    "tied by glob": r"ValueError: .*model.embedding \(unit model.embedding\) and model.head \(unit root\)",
    "nothing matches": r"ValueError: found no 'encoder.\*' in TiedModule; .*Tied \(1\).*Block \(3\)",
    "copies": r"ValueError: .*2 ranks / 3 copies = 0.67 ranks a copy",
    "groups": r"ValueError: .*got 3 for 2 = world size 2 / replicate size 1",
    "by hand": r"MisconfigurationException: .*already \(fully_shard\)",
    "ddp inside": r"MisconfigurationException: .*already \(DistributedDataParallel\)",
    "double": r"ValueError: .*64-true.*8 bytes a parameter where 32-true takes 4",
    "double plugin": r"ValueError: .*64-true",
    "scaler": r"ValueError: .*loss scaler \(fp16\), got model.temperature without one",
    "ema": r"MisconfigurationException: .*PL#21414.*EMAWeightAveraging",
    "swa": r"MisconfigurationException: .*StochasticWeightAveraging",
    "adafactor": r"ValueError: .*torch's Adafactor.*zero1",
    "rprop": r"ValueError: .*torch's Rprop.*zero1",
    "own parameter": r"ValueError: .*got scale, which belongs to no such module of OwnParameter",
    "early optimizer": r"ValueError: expected SGD to hold the sharded module's parameters, got 14 others",
    "muon": r"ValueError: .*torch's Muon.*zero1",
    "lbfgs": r"ValueError: .*torch's LBFGS.*ddp",
    "lbfgs zero1": r"ValueError: .*got LBFGS.*ddp",
    "fused sgd": r"ValueError: expected SGD without fused=True",
    "no reset": r"ValueError: .*got none for net.4.scale: no reset_parameters of Scale is there to fill it",
    "policy": r"ValueError: expected precision=\"bf16-mixed\".*got '32-true'",
    "no file": r"FileNotFoundError: .*nowhere.pt",
    "dtypes": r"ValueError: .*net.0.linear.weight \(bfloat16\), net.0.norm.weight \(float32\) in unit net.0",
    "sparse": r"ValueError: .*the embedding model.embedding with sparse=True.*ddp",
    "zero1 after fsdp2": r"ValueError: ZeRO1Strategy expected a plain module, got one that is sharded",
    "other mesh": r"ValueError: expected a module that was sharded over",
    "other settings": r"ValueError: .*'reshard_after_forward': False.*'reshard_after_forward': True",
    "other precision": r"ValueError: expected a module that was sharded over .*MixedPrecisionPolicy",
    "built anew": r"ValueError: .*got net.0.linear.weight that is not sharded: it was built anew",
}


def test_what_cannot_be_right_is_refused_at_the_start(two_processes) -> None:
    for found in two_processes.run(cases.refusals, True):
        assert found.keys() == EXPECTED.keys()
        for name, words in EXPECTED.items():
            with pytest.raises(ValueError, match=f"(?s){words}"):
                raise ValueError(found[name])


def test_the_check_for_gpus_is_sound(one_process) -> None:
    (rows,) = one_process.run(cases.the_check_for_gpus)
    assert len(rows) >= 8
    assert all(holds for *_, holds in rows), rows


@all_strategies
def test_compiled_blocks_train(strategy: str, two_processes) -> None:
    two_processes.run(cases.compiled, strategy)


@all_strategies
def test_buffers_of_any_dtype_and_weights_of_any_strides(strategy: str, two_processes) -> None:
    two_processes.run(cases.unusual_tensors, strategy)


def test_built_by_the_command_line_from_yaml(two_processes, tmp_path) -> None:
    for plan in two_processes.run(cases.from_yaml, str(tmp_path)):
        assert plan.splitlines()[1:3] == ["net.1  88          176", "root   185         388"]


def test_no_rank_holds_the_weights_of_a_file(two_processes, tmp_path) -> None:
    cases.write_wide(str(tmp_path / "weights.pt"))
    for share in two_processes.run(cases.memory_of_loading, str(tmp_path / "weights.pt")):
        assert share < 0.95  # its half, a block, and what the heap keeps: with the whole it was 1.5


@all_strategies
def test_an_exception_leaves_the_module_and_its_checkpoint_right(strategy: str, two_processes, tmp_path) -> None:
    two_processes.run(cases.crash, strategy, str(tmp_path))


@all_strategies
def test_gradients_of_an_open_window_do_not_reach_the_next_fit(strategy: str, two_processes) -> None:
    two_processes.run(cases.second_fit_after_an_open_window, strategy)


def test_gradients_of_parameters_kept_whole_are_averaged(two_processes) -> None:
    two_processes.run(cases.kept_whole)


def test_evaluations_see_rank_0s_buffers(two_processes) -> None:
    first, second = two_processes.run(cases.buffers_of_an_evaluation)
    assert first == second != 0.0


@all_strategies
def test_hooks_of_optimizers_logs_of_callbacks_and_forwards_outside_of_steps(strategy: str, two_processes) -> None:
    two_processes.run(cases.odds_and_ends, strategy)


def test_no_rank_keeps_the_whole_parameters(two_processes) -> None:
    assert two_processes.run(cases.forgotten_originals) == [0, 0]


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1"])
def test_lightnings_asynchronous_plugin_saves(strategy: str, two_processes, tmp_path) -> None:
    two_processes.run(cases.asynchronous_plugin, strategy, str(tmp_path))


def test_checkpoints_in_the_wrong_place_or_of_the_wrong_kind(two_processes, tmp_path) -> None:
    (tmp_path / "precious").write_text("data")
    for place, folder, kind, weights_only in two_processes.run(cases.places_and_kinds, str(tmp_path)):
        assert "ValueError: expected a path of a file system that all ranks share" in place
        assert "IsADirectoryError: expected the path of a checkpoint to be free" in folder
        assert "consolidate DIR FILE" in kind
        assert "checkpoint contains only the model" in weights_only
    assert (tmp_path / "precious").read_text() == "data"


def test_batchnorm_born_in_16_bits_becomes_fp32(two_processes) -> None:
    assert two_processes.run(cases.born_half) == [(torch.float32, torch.bfloat16)] * 2


def test_blocks_that_are_called_by_another_method_train(two_processes) -> None:
    two_processes.run(cases.check, cases.CalledOtherwise)


def test_the_learning_rate_is_logged_under_the_optimizers_name(two_processes) -> None:
    for keys in two_processes.run(cases.monitored_rates):
        assert keys == ["lr-SGD"]


def test_errors_of_sharded_tensors_say_what_to_do(two_processes) -> None:
    for notes in two_processes.run(cases.notes_of_errors):
        assert "outside of the forward of its sharding unit" in notes[0]
        assert "GradientNormClipping, which logs grad/norm" in notes[1]


def test_resharding_to_groups_of_two_trains_alike(four_processes) -> None:
    four_processes.run(cases.check, cases.Net, lt.FSDP2Strategy(reshard_after_forward=2))
