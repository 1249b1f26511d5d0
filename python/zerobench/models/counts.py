"""Parameters and FLOPs of a model from its configuration alone. Imports no torch.

Each architecture's weights are listed once, so that the number of parameters and the multiplications that a token takes
part in come from the same list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerobench.errors import ConfigError
from zerobench.models.config import ModelConfig, SizedConfig
from zerobench.models.hf_config import HFConfig
from zerobench.models.measured import MeasuredConfig
from zerobench.models.presets import PresetConfig


@dataclass
class Tally:
    """Weights of a model, or of a part of it."""

    parameters: int = 0
    matmul_numel: int = 0  # elements of weight matrices that one token is multiplied with

    def linear(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        self.parameters += inputs * outputs + (outputs if bias else 0)
        self.matmul_numel += inputs * outputs

    def table(self, rows: int, width: int = 1) -> None:
        """Weights that are looked up, added or scaled with: embeddings, norms, biases."""
        self.parameters += rows * width

    def add(self, part: Tally, *, times: int, active: int | None = None) -> None:
        """``part`` ``times`` over, of which ``active`` (default: all) work on a token."""
        self.parameters += times * part.parameters
        self.matmul_numel += (times if active is None else active) * part.matmul_numel


def parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters, a tied weight counted once. Exact, but for a measured model (``examine``) with
    another number of layers than it was measured with. Raises ConfigError for a model that was not measured."""
    if not isinstance(config, MeasuredConfig):
        return tally(config).parameters
    if config.parameters is None:
        raise ConfigError(
            f"the parameters of model {config.name!r} are not counted yet: pass it to zerobench.models.examine first"
        )
    return config.parameters


def logits_numel(config: ModelConfig, seq_length: int) -> int:
    """Return how many logits a sample of ``seq_length`` tokens has; 0 where that is unknown."""
    if isinstance(config, MeasuredConfig) and not config.predicts_tokens:
        return 0
    return seq_length * (config.vocab_size or 0)


def flops_per_token(config: ModelConfig, seq_length: int) -> float | None:
    """Floating-point operations of forward and backward per token of a sequence of ``seq_length``.

    3 x (2 x M + 4 x L x A x S): a multiplication and an addition for each of the M weight matrix elements that a token
    meets (the head too, also when tied; of experts those that a token is routed to), and for each of L layers the two
    products of attention, queries with keys and scores with values, A = heads x head size wide over S positions;
    backward costs twice the forward. As in PaLM (arXiv 2204.02311, appendix B) attention counts every position, not
    only those that a causal mask leaves; a sliding window bounds S. Recomputation (gradient checkpointing), norms,
    activations, embeddings' lookups, the softmax and the optimizer do not count. None for a model whose sizes are
    unknown.
    """
    if not isinstance(config, SizedConfig):
        return None
    positions = seq_length
    attention_width = config.hidden_size
    if isinstance(config, HFConfig):
        attention_width = config.num_heads * config.head_size
        positions = min(seq_length, config.sliding_window or seq_length)
    attention = 4 * config.num_layers * attention_width * positions
    return 3.0 * (2 * tally(config).matmul_numel + attention)


def tally(config: ModelConfig) -> Tally:
    """Every weight of the model."""
    if isinstance(config, PresetConfig):
        return _gpt(config, config.ffn_size)
    assert isinstance(config, HFConfig)
    return _TALLIES[config.architecture](config)


def _gpt(config: SizedConfig, ffn_size: int) -> Tally:
    h = config.hidden_size
    block = _biased_block(h, ffn_size)
    total = Tally()
    total.table(config.vocab_size, h)
    total.table(config.max_seq_length, h)
    total.add(block, times=config.num_layers)
    total.table(2, h)
    _head(total, config, h)
    return total


def _biased_block(h: int, ffn_size: int) -> Tally:
    """Attention of four projections and a feed-forward of two, all with biases, and two layer norms."""
    block = Tally()
    for _ in range(4):
        block.linear(h, h, bias=True)
    block.linear(h, ffn_size, bias=True)
    block.linear(ffn_size, h, bias=True)
    block.table(4, h)
    return block


def _head(total: Tally, config: SizedConfig, width: int) -> None:
    """The projection onto the vocabulary, whose weight may be the embedding's."""
    total.linear(width, config.vocab_size)
    if config.tied_embeddings:
        total.parameters -= width * config.vocab_size


def _llama(config: HFConfig) -> Tally:
    """Llama, Mistral, Mixtral and Qwen 2: gated feed-forward, RMS norms, no position table."""
    h, bias = config.hidden_size, bool(config.other.get("attention_bias"))
    query, key = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    projections_bias = bias or config.architecture == "qwen2"
    block = Tally()
    block.linear(h, query, bias=projections_bias)
    block.linear(h, key, bias=projections_bias)
    block.linear(h, key, bias=projections_bias)
    block.linear(query, h, bias=bias)
    feed_forward = Tally()
    mlp_bias = bool(config.other.get("mlp_bias"))
    feed_forward.linear(h, config.ffn_size, bias=mlp_bias)
    feed_forward.linear(h, config.ffn_size, bias=mlp_bias)
    feed_forward.linear(config.ffn_size, h, bias=mlp_bias)
    if config.num_experts:
        block.linear(h, config.num_experts)  # router
        block.add(feed_forward, times=config.num_experts, active=config.experts_per_token)
    else:
        block.add(feed_forward, times=1)
    block.table(2, h)
    total = Tally()
    total.table(config.vocab_size, h)
    total.add(block, times=config.num_layers)
    total.table(1, h)
    _head(total, config, h)
    return total


def _opt(config: HFConfig) -> Tally:
    h, embedding_size = config.hidden_size, config.embedding_size
    total = Tally()
    total.table(config.vocab_size, embedding_size)
    total.table(config.max_seq_length + 2, h)  # OPT's positions begin at two
    if embedding_size != h:
        total.linear(embedding_size, h)
        total.linear(h, embedding_size)
    total.add(_biased_block(h, config.ffn_size), times=config.num_layers)
    if config.other.get("do_layer_norm_before", True) and not config.other.get("_remove_final_layer_norm"):
        total.table(2, h)
    _head(total, config, embedding_size)
    return total


def _bert(config: HFConfig) -> Tally:
    h = config.hidden_size
    total = Tally()
    total.table(config.vocab_size + config.max_seq_length + config.other.get("type_vocab_size", 2) + 2, h)
    total.add(_biased_block(h, config.ffn_size), times=config.num_layers)
    total.linear(h, h, bias=True)  # the masked language model head's own layer, and its norm
    total.table(2, h)
    total.table(config.vocab_size)
    _head(total, config, h)
    return total


_TALLIES: dict[str, Callable[[HFConfig], Tally]] = {
    "gpt2": lambda config: _gpt(config, config.ffn_size),
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "qwen2": _llama,
    "opt": _opt,
    "bert": _bert,
}
