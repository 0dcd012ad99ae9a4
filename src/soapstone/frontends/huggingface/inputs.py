"""Example inputs: made up from the names that a model's `forward` takes and the sizes its configuration
states.

Numbers are drawn from a fixed seed. Every name has one recipe; a name is given if the model cannot run
without it, if it is what the model is about (text, pixels, sound), or if a loss needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from soapstone.errors import CaptureError
from soapstone.frontends.huggingface.configuration import parts

_DEFAULT_LENGTH = 128
_DEFAULT_SIDE = 224
_DEFAULT_SOUND = 4000
_DEFAULT_FRAMES = 400
_LABELS_OF_SOUND = 8

_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_len",
    "context_length",
)
_MELS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "n_mels")
_SOUND = ("input_values", "input_features")
_WANTED = frozenset(
    {
        "input_ids",
        "pixel_values",
        "input_values",
        "input_features",
        "decoder_input_ids",
        "bbox",
        "labels",
        "next_sentence_label",
        "sentence_order_label",
        "start_positions",
        "end_positions",
        "past_values",
        "past_time_features",
        "past_observed_mask",
        "future_values",
        "future_time_features",
        "bool_masked_pos",
    }
)


def example_inputs(
    model: nn.Module, config: Any, batch: int, length: int | None, name: str, notes: list[str]
) -> dict[str, Tensor]:
    """Inputs by name, in the order in which the model takes them; labels last."""
    return _Example(model, config, batch, length, name, notes).inputs()


class _Example:
    """One example in the making."""

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        batch: int,
        length: int | None,
        name: str,
        notes: list[str],
    ) -> None:
        self.model, self.config, self.batch = model, config, batch
        self.name, self.notes = name, notes
        self.kind = type(model).__name__
        self.taken = inspect.signature(model.forward).parameters
        self.generator = torch.Generator(device="cpu").manual_seed(0)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.asked = length
        self.length = min(length or _DEFAULT_LENGTH, self._longest())
        self.made: dict[str, Tensor] = {}
        self.without_images = False

    def inputs(self) -> dict[str, Tensor]:
        main = getattr(self.model, "main_input_name", "input_ids")
        for name, parameter in self.taken.items():
            required = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if not (required or name == main or name in _WANTED) or name == "labels":
                continue
            if name in _SOUND and not required and name != main and self._has_sound_tokens():
                self.notes.append(f"sound is left out: the graph is that of a batch without '{name}'")
                continue
            made = _RECIPES[name](self) if name in _RECIPES else None
            if made is not None:
                self.made[name] = made
            elif required or name == main:
                raise CaptureError(
                    f"model '{self.name}' ({self.kind}): no example can be made up for its input '{name}':"
                    " write a Python file that returns the model and its inputs"
                )
        if "labels" in self.taken:
            labels = self._labels()
            if labels is not None:
                self.made["labels"] = labels
        return self.made

    def _has_sound_tokens(self) -> bool:
        """Whether the model puts sound in the place of tokens, as many as it takes to hold it."""
        return self.field("audio_token_id", "audio_token_index") is not None

    # -- numbers -----------------------------------------------------------------------------------

    def integers(self, below: int, *shape: int) -> Tensor:
        drawn = torch.randint(max(1, below), shape, generator=self.generator, device="cpu")
        return drawn.to(torch.get_default_device())

    def floats(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float32)
        return drawn.to(torch.get_default_device(), self.dtype)

    # -- what the configuration states -------------------------------------------------------------

    def field(self, *names: str, default: Any = None, within: str = "") -> Any:
        """The first of these fields that is set, in the outermost configuration that has one.

        `within` prefers parts whose name holds that word (`vision` for `vision_config`).
        """
        for config in sorted(self._parts(), key=lambda item: bool(within) and within not in item[0]):
            for name in names:
                value = getattr(config[1], name, None)
                if value is not None:
                    return value
        return default

    def _parts(self) -> Iterator[tuple[str, Any]]:
        seen = {id(value): key for part in parts(self.config) for key, value in vars(part).items()}
        for part in parts(self.config):
            yield seen.get(id(part), ""), part

    def _longest(self) -> int:
        """The longest sequence that the model's positions allow."""
        text = self._text()
        found = [getattr(text, field, None) for field in _POSITIONS]
        longest = min((n for n in found if isinstance(n, int) and n > 0), default=1 << 20)
        for path, part in self.model.named_modules():
            # RoBERTa and its kin count positions from behind that of padding.
            if path.endswith("position_embeddings") and isinstance(getattr(part, "padding_idx", None), int):
                longest -= part.padding_idx + 1
                break
        return longest

    def _text(self) -> Any:
        return self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config

    def _vocabulary(self, within: str = "") -> int:
        if not within:
            own = getattr(self._text(), "vocab_size", None)
            if isinstance(own, int):
                return own
        size = self.field("vocab_size", "num_hash_buckets", within=within)
        return size if isinstance(size, int) else 0

    # -- recipes -----------------------------------------------------------------------------------

    def input_ids(self) -> Tensor | None:
        vocabulary = self._vocabulary()
        if not vocabulary:
            return None
        if "MultipleChoice" in self.kind:
            return self.integers(vocabulary, self.batch, 2, self.length)
        words = self.integers(vocabulary, self.batch, self.length)
        image = self.field("image_token_id", "image_token_index")
        if "pixel_values" not in self.taken or not isinstance(image, int):
            return words
        count = self._image_tokens()
        if count is None:
            return words
        words = torch.where(words == image, (image + 1) % vocabulary, words)
        return torch.cat([words.new_full((self.batch, count), image), words], dim=1)

    def _image_tokens(self) -> int | None:
        """How many tokens an image becomes: what the model's own vision part gives; None, and a note,
        if images cannot be made up for it."""
        features: Any = getattr(self.model, "get_image_features", None)
        one = self.pixel_values()
        # Some models take several images for each text.
        for pixels in (one, one.unsqueeze(1)) if features is not None else ():
            try:
                with torch.no_grad():
                    found = features(pixel_values=pixels)
            except Exception:  # noqa: BLE001 (a model's own code may raise anything)
                continue
            self.made["pixel_values"] = pixels
            found = getattr(found, "pooler_output", found)
            tensors = found if isinstance(found, list | tuple) else [found]
            return sum(int(t.shape[:-1].numel()) for t in tensors) // self.batch
        self.without_images = True
        self.notes.append(
            "images are left out, because their form depends on more than the configuration: the graph is"
            " that of a batch of text"
        )
        return None

    def decoder_input_ids(self) -> Tensor | None:
        if not getattr(self.config, "is_encoder_decoder", False):
            return None
        vocabulary = self._vocabulary("decoder")
        return self.integers(vocabulary, self.batch, self.length) if vocabulary else None

    def images(self) -> Tensor | None:
        if self.without_images:
            return None
        return self.made["pixel_values"] if "pixel_values" in self.made else self.pixel_values()

    def pixel_values(self) -> Tensor:
        channels = self.field("num_channels", "in_channels", "in_chans", within="vision", default=3)
        size = self.field("image_size", "img_size", "input_size", within="vision", default=_DEFAULT_SIDE)
        frames = self.field("num_frames", within="vision")
        front = (self.batch, frames) if isinstance(frames, int) else (self.batch,)
        return self.floats(*front, int(channels), *_size(size))

    def input_values(self) -> Tensor:
        bins = self.field("num_mel_bins")
        if bins is not None and self.field("max_length") is not None:
            return self.floats(self.batch, int(self.field("max_length")), int(bins))
        sound = self.asked or _DEFAULT_SOUND
        channels = self.field("audio_channels")
        return (
            self.floats(self.batch, sound) if channels is None else self.floats(self.batch, channels, sound)
        )

    def input_features(self) -> Tensor:
        mels = int(self.field(*_MELS, within="audio", default=80))
        source = self.field("max_source_positions", within="audio")
        # Whisper and its kin begin with a convolution over time, of stride two in all.
        for path, part in self.model.named_modules():
            if isinstance(part, nn.Conv1d) and path.endswith("conv1") and part.in_channels == mels:
                return self.floats(self.batch, mels, 2 * int(source or _DEFAULT_FRAMES))
        return self.floats(self.batch, min(self.asked or _DEFAULT_FRAMES, int(source or 1 << 20)), mels)

    def bbox(self) -> Tensor:
        corner = self.integers(500, self.batch, self.length, 2)
        extent = self.integers(500, self.batch, self.length, 2)
        return torch.cat([corner, corner + extent], dim=-1)

    def classes(self) -> Tensor:
        return self.integers(2, self.batch)

    def place(self) -> Tensor:
        return self.integers(self.length, self.batch)

    def patches(self) -> Tensor | None:
        pixels, size = self.made.get("pixel_values"), self.field("patch_size", within="vision")
        if pixels is None or not isinstance(size, int):
            return None
        count = (pixels.shape[-2] // size) * (pixels.shape[-1] // size)
        return self.integers(2, self.batch, count).bool()

    # -- series --------------------------------------------------------------------------------------

    def _series(self, length: int | None, features: int | None) -> Tensor | None:
        if not length:
            return None
        return self.floats(self.batch, length, *([features] if features and features > 1 else []))

    def _past(self) -> int:
        lags = self.field("lags_sequence", default=[])
        return int(self.field("context_length", default=32)) + max(lags, default=0)

    def past_values(self) -> Tensor | None:
        channels = self.field("num_input_channels")
        if channels is not None:
            return self.floats(self.batch, self._past(), int(channels))
        return self._series(self._past(), self.field("input_size"))

    def past_time_features(self) -> Tensor:
        return self.floats(self.batch, self._past(), int(self.field("num_time_features", default=0)))

    def past_observed_mask(self) -> Tensor | None:
        values = self.past_values()
        return None if values is None else torch.ones_like(values)

    def future_values(self) -> Tensor | None:
        length = self.field("prediction_length", "horizon_length")
        return self._series(length, self.field("input_size", "num_input_channels"))

    def future_time_features(self) -> Tensor | None:
        length = self.field("prediction_length")
        return length and self.floats(self.batch, length, int(self.field("num_time_features", default=0)))

    # -- labels ----------------------------------------------------------------------------------------

    def _labels(self) -> Tensor | None:
        """Labels for the loss that the class of the model computes."""
        first = next(iter(self.made.values()), None)
        if first is None:
            return None
        classes = int(getattr(self.config, "num_labels", None) or 2)
        for part, shape in _LABEL_SHAPES.items():
            if part in self.kind:
                size = shape(first)
                return self.integers(classes, *size) if classes > 1 else self.floats(*size)
        if self.kind.endswith("ForCTC"):
            # Zero is the usual blank, which is no label.
            return self.integers(self._vocabulary() - 1, self.batch, _LABELS_OF_SOUND) + 1
        words = self.made.get("decoder_input_ids", self.made.get("input_ids"))
        if words is None or words.ndim != 2:
            return None
        within = "decoder" if "decoder_input_ids" in self.made else ""
        return self.integers(self._vocabulary(within), *words.shape)


_LABEL_SHAPES: Mapping[str, Callable[[Tensor], tuple[int, ...]]] = {
    "TokenClassification": lambda x: tuple(x.shape[:2]),
    "Segmentation": lambda x: (x.shape[0], *x.shape[-2:]),
    "Classification": lambda x: (x.shape[0],),
    "MultipleChoice": lambda x: (x.shape[0],),
    "NextSentence": lambda x: (x.shape[0],),
}
"""By a part of the class's name: what of the first input one label stands for."""

_RECIPES: Mapping[str, Callable[[_Example], Tensor | None]] = {
    "input_ids": _Example.input_ids,
    "pixel_values": _Example.images,
    "pixel_values_videos": _Example.pixel_values,
    "input_values": _Example.input_values,
    "input_features": _Example.input_features,
    "decoder_input_ids": _Example.decoder_input_ids,
    "bbox": _Example.bbox,
    "next_sentence_label": _Example.classes,
    "sentence_order_label": _Example.classes,
    "start_positions": _Example.place,
    "end_positions": _Example.place,
    "past_values": _Example.past_values,
    "past_time_features": _Example.past_time_features,
    "past_observed_mask": _Example.past_observed_mask,
    "future_values": _Example.future_values,
    "future_time_features": _Example.future_time_features,
    "bool_masked_pos": _Example.patches,
}


def _size(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    if isinstance(size, list | tuple):
        return int(size[-2] if len(size) > 1 else size[0]), int(size[-1])
    return int(size), int(size)
