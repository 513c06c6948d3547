"""Fields of other servers of this API, and fields of OpenAI's that have no effect here.

A field that would change an answer is `Unsupported`, except for the values that switch it off. Any other field is `Ignored`. Sources:
llama.cpp's tools/server/README.md, vLLM's OpenAI-compatible server, LM Studio's REST API, OpenRouter's parameters.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ..model_manager.duration import seconds_of
from ..validation import Ignored, StrictModel, Unsupported

MOST_TTL_S = 2**31

_AS_LOADED = "this is fixed when a model is loaded"
_CACHED = "prompts are cached by their tokens, for all users, while memory is free"
_NOT_KEPT = "nothing is stored"
_NO_BEAMS = "beam search is not supported"
_NO_TIMES = "times are in /metrics and in the log"
_STAGES = "the order of the sampling stages is fixed"
_TEMPLATE = "the template and the tokenizer define the start and end of a prompt"
VERBOSITY = Ignored("the length of answers is not passed to the model")
_OTHER_NAME = "not supported under this name: it is {} here"


class OpenAIExtras(StrictModel):
    """Fields of OpenAI's own service."""

    store: Annotated[Any, Ignored(_NOT_KEPT)] = None
    metadata: Annotated[Any, Ignored(_NOT_KEPT)] = None
    service_tier: Annotated[Any, Ignored("all requests have the same priority")] = None
    safety_identifier: Annotated[Any, Ignored("users are not monitored")] = None
    prompt_cache_key: Annotated[Any, Ignored(_CACHED)] = None
    prompt_cache_retention: Annotated[Any, Ignored(_CACHED)] = None
    prompt_cache_options: Annotated[Any, Ignored(_CACHED)] = None


class LlamaCppExtras(StrictModel):
    """Fields of llama.cpp's server and its web page."""

    cache_prompt: Annotated[Any, Ignored(_CACHED)] = None
    n_cache_reuse: Annotated[Any, Ignored(_CACHED)] = None
    id_slot: Annotated[Any, Ignored("requests have no fixed slots")] = None
    n_keep: Annotated[Any, Ignored("prompts are never cut")] = None
    min_keep: Annotated[Any, Ignored("the most likely token always remains")] = None
    samplers: Annotated[Any, Ignored(_STAGES)] = None
    backend_sampling: Annotated[Any, Ignored(_STAGES)] = None
    repeat_last_n: Annotated[Any, Ignored("penalties apply to the whole text")] = None
    timings_per_token: Annotated[Any, Ignored(_NO_TIMES)] = None
    return_progress: Annotated[Any, Ignored(_NO_TIMES)] = None
    reasoning_format: Annotated[Any, Ignored("the server sets the fields for reasoning")] = None
    dynatemp_range: Annotated[Any, Unsupported(0, 0.0)] = None
    dynatemp_exponent: Annotated[Any, Ignored("the temperature is fixed")] = None
    xtc_probability: Annotated[Any, Unsupported(0, 0.0)] = None
    xtc_threshold: Annotated[Any, Ignored("XTC is not supported")] = None
    typical_p: Annotated[Any, Unsupported(1, 1.0)] = None
    top_n_sigma: Annotated[Any, Unsupported(-1, -1.0)] = None
    mirostat: Annotated[Any, Unsupported(0)] = None
    mirostat_tau: Annotated[Any, Ignored("Mirostat is not supported")] = None
    mirostat_eta: Annotated[Any, Ignored("Mirostat is not supported")] = None
    dry_multiplier: Annotated[Any, Unsupported(0, 0.0)] = None
    dry_base: Annotated[Any, Ignored("DRY is not supported")] = None
    dry_allowed_length: Annotated[Any, Ignored("DRY is not supported")] = None
    dry_penalty_last_n: Annotated[Any, Ignored("DRY is not supported")] = None
    dry_sequence_breakers: Annotated[Any, Ignored("DRY is not supported")] = None
    repeat_penalty: Annotated[Any, Unsupported(1, 1.0, why=_OTHER_NAME.format("repetition_penalty"))] = None
    n_predict: Annotated[Any, Unsupported(-1, why=_OTHER_NAME.format("max_tokens"))] = None
    n_probs: Annotated[Any, Unsupported(0, why=_OTHER_NAME.format("logprobs"))] = None
    grammar: Annotated[Any, Unsupported("", why=_OTHER_NAME.format("structured_outputs.grammar"))] = None
    json_schema: Annotated[Any, Unsupported({}, why=_OTHER_NAME.format("response_format"))] = None
    post_sampling_probs: Annotated[Any, Unsupported(False)] = None
    return_tokens: Annotated[Any, Unsupported(False)] = None
    t_max_predict_ms: Annotated[Any, Unsupported(0)] = None
    lora: Annotated[Any, Unsupported([])] = None


class VLLMExtras(StrictModel):
    """Fields of vLLM. SGLang and TabbyAPI have some of them too."""

    add_generation_prompt: Annotated[Any, Unsupported(True)] = None
    continue_final_message: Annotated[Any, Unsupported(False)] = None
    add_special_tokens: Annotated[Any, Ignored(_TEMPLATE)] = None
    skip_special_tokens: Annotated[Any, Unsupported(True)] = None
    spaces_between_special_tokens: Annotated[Any, Ignored("special tokens are left out")] = None
    include_stop_str_in_output: Annotated[Any, Unsupported(False)] = None
    min_tokens: Annotated[Any, Unsupported(0)] = None
    truncate_prompt_tokens: Annotated[Any, Unsupported()] = None
    prompt_logprobs: Annotated[Any, Unsupported()] = None
    return_token_ids: Annotated[Any, Unsupported(False)] = None
    return_tokens_as_token_ids: Annotated[Any, Unsupported(False)] = None
    allowed_token_ids: Annotated[Any, Unsupported([])] = None
    bad_words: Annotated[Any, Unsupported([])] = None
    use_beam_search: Annotated[Any, Unsupported(False)] = None
    length_penalty: Annotated[Any, Ignored(_NO_BEAMS)] = None
    early_stopping: Annotated[Any, Ignored(_NO_BEAMS)] = None
    documents: Annotated[Any, Unsupported([])] = None
    chat_template: Annotated[Any, Unsupported("")] = None
    chat_template_content_format: Annotated[Any, Ignored("the template decides the form of messages")] = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Cached prompts are shared only among requests with the same salt."""
    priority: Annotated[Any, Ignored("requests of different users are scheduled fairly")] = None
    request_id: Annotated[Any, Ignored("the server sets the ids of requests")] = None
    logits_processors: Annotated[Any, Unsupported([])] = None
    lora_path: Annotated[Any, Unsupported("")] = None
    mm_processor_kwargs: Annotated[Any, Unsupported({}, why="not supported: detail of an image sets its size")] = None
    kv_transfer_params: Annotated[Any, Ignored("there is only one machine")] = None
    vllm_xargs: Annotated[Any, Unsupported({})] = None


class RouterExtras(StrictModel):
    """Fields of LM Studio and of OpenRouter."""

    ttl: Annotated[float, Field(ge=-1, le=MOST_TTL_S)] | None = None
    """LM Studio's: seconds after the answer for which the model stays loaded; -1 means for ever."""
    draft_model: Annotated[Any, Ignored(_AS_LOADED)] = None
    provider: Annotated[Any, Ignored("the model runs here")] = None
    models: Annotated[Any, Ignored("the model is the one named")] = None
    route: Annotated[Any, Ignored("the model is the one named")] = None
    transforms: Annotated[Any, Ignored("a prompt that is too long is refused, never cut")] = None
    usage: Annotated[Any, Ignored("answers always have their usage, streams with stream_options.include_usage")] = None
    session_id: Annotated[Any, Ignored(_NOT_KEPT)] = None
    trace: Annotated[Any, Ignored(_NOT_KEPT)] = None
    plugins: Annotated[Any, Unsupported([])] = None
    preset: Annotated[Any, Unsupported("")] = None
    top_a: Annotated[Any, Unsupported(0, 0.0)] = None


class Extras(OpenAIExtras, LlamaCppExtras, VLLMExtras, RouterExtras):
    """All extra fields."""

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds after the answer for which the model stays loaded; None means the server's default."""
        return None if self.ttl is None else seconds_of(self.ttl)
