"""The known feed-forward blocks, by the names of their children: one row per kind of block.

To add one, add a row to `PATTERNS`, and a module of it to `BLOCKS` in tests/models/fusion/made_blocks.py. Nothing else
knows a block by name.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["whole", "hidden", "output"]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A feed-forward block, or a part of one, by the names of its children.

    Attributes:
        role: whole is ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate; hidden is ``act(up(x))``;
            output is ``norm(down(h) + x)``.
        up: also the gate where both are the halves of one matrix, gate first.
        act: where the activation is.
        norm: None for no norm.
    """

    role: Role
    up: str | None = None
    down: str | None = None
    act: str | None = None
    gate: str | None = None
    norm: str | None = None

    @property
    def linears(self) -> tuple[str, ...]:
        """The linear layers' names, each once."""
        return tuple(dict.fromkeys(it for it in (self.gate, self.up, self.down) if it is not None))

    @property
    def needed(self) -> tuple[str, ...]:
        """The attributes that a module of this pattern has."""
        return (*self.linears, *(it for it in (self.act, self.norm) if it is not None))


PATTERNS = (
    Pattern("whole", gate="gate_proj", up="up_proj", down="down_proj", act="act_fn"),  # Llama, Mistral, Qwen, Gemma
    Pattern("whole", gate="gate_up_proj", up="gate_up_proj", down="down_proj", act="activation_fn"),  # Phi-3
    Pattern("whole", gate="wi_0", up="wi_1", down="wo", act="act"),  # T5 v1.1
    Pattern("whole", up="wi", down="wo", act="act"),  # T5
    Pattern("whole", up="c_fc", down="c_proj", act="act"),  # GPT-2
    Pattern("whole", up="fc1", down="fc2", act="activation_fn"),  # ViT, CLIP, SigLIP
    Pattern("whole", up="fc1", down="fc2", act="act"),  # timm
    Pattern("whole", up="lin1", down="lin2", act="activation"),  # DistilBERT
)
# BERT and its kin keep a block in two modules, side by side in a layer; an output alone may be the attention's.
PAIR = {
    "intermediate": Pattern("hidden", up="dense", act="intermediate_act_fn"),
    "output": Pattern("output", down="dense", norm="LayerNorm"),
}
