"""A small transformer for sentences, made to be trained from scratch by plain SGD."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Layer(nn.Module):
    """Self-attention, then two linear layers, each after a LayerNorm and with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            part(y).view(n, length, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        out: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return out


class TinyTransformer(nn.Module):
    """Embeddings, two layers, the mean over a sentence's tokens, one linear layer.

    The layers' matrices are prunable, as in BERT. Embeddings, LayerNorm, biases and the last layer stay dense. The
    classifier reads the mean, not the first token, so that plain SGD finds a signal early.
    """

    def __init__(self, classes: int = 2, vocab: int = 8192, length: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, 64)
        self.places = nn.Embedding(length, 64)
        self.norm = nn.LayerNorm(64)
        self.layers = nn.ModuleList(Layer(width=64, heads=4) for _ in range(2))
        self.last = nn.LayerNorm(64)
        self.fc = nn.Linear(64, classes)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                nn.init.zeros_(part.bias)
            elif isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=0.03)  # small, so that behind the LayerNorm they learn fast
        nn.init.normal_(self.fc.weight, std=0.01)

    @staticmethod
    def prunable(name: str, p: nn.Parameter) -> bool:
        return name.startswith("layers.") and p.dim() == 2

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        seen = attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        weight = attention_mask.to(x.dtype)[:, :, None]
        mean = (x * weight).sum(1) / weight.sum(1).clamp(min=1)
        logits: Tensor = self.fc(self.last(mean))
        return logits
