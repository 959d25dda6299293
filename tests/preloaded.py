"""What every rank needs. Imported once, by the server that the ranks are forked from: importing costs seconds."""

import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import tests.behaviour_cases
import tests.checkpoint_cases
import tests.jobs_worker
import tests.strategy_cases  # noqa: F401
