"""Settings of a run, section by section as in its YAML file."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from oomb.lengths import parse_length
from oomb.nearest import nearest
from oomb.train.engine_settings import EngineSettings
from oomb.train.section import Section

Count = Annotated[int, Field(ge=1, le=2**40)]
Rate = Annotated[float, Field(ge=0)]
Scalar = str | int | float | bool


def _length(value: Any) -> Any:
    """A number of tokens, also as text such as 128K."""
    if not isinstance(value, str) or value.strip()[-1:].upper() not in ("K", "M"):
        return value
    try:
        return parse_length("", value)
    except ValueError as error:  # the field's name is put before it
        raise ValueError(str(error).removeprefix(": ")) from None


Tokens = Annotated[int, BeforeValidator(_length)]


def _path(value: str) -> str:
    value = os.path.expanduser(value)  # here, so that all who use it mean the same folder
    longest = max(len(part.encode()) for part in value.split("/"))
    if longest > 255:
        raise ValueError(f"expected names of at most 255 bytes in a path, got {longest}")
    return value


PathText = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_path)]


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


Names = Annotated[list[str], BeforeValidator(_one_or_more)]


class RopeSettings(Section):
    """As `rope_parameters` in a transformers config; what is null stays as it is."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] | None = None
    """How positions are stretched; `yarn` is the usual choice for real extension."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the angles."""
    factor: Annotated[float, Field(ge=1)] | None = None
    """How many times more positions than the model was trained on."""
    original_max_position_embeddings: Count | None = None
    """Positions that the model was trained on. null: what its config says."""
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    """Of `yarn` and `longrope`: factor on cosines and sines. null: derived from `factor`."""
    beta_fast: float | None = None
    """Of `yarn`: rotations above which a dimension is left as it is."""
    beta_slow: float | None = None
    """Of `yarn`: rotations below which a dimension is fully stretched."""
    low_freq_factor: float | None = None
    """Of `llama3`."""
    high_freq_factor: float | None = None
    """Of `llama3`."""
    short_factor: list[float] | None = None
    """Of `longrope`: one number per pair of dimensions."""
    long_factor: list[float] | None = None
    """Of `longrope`: one number per pair of dimensions."""


class ModelSettings(Section):
    name: PathText
    """Folder of a transformers causal language model, or its name on the Hugging Face hub."""
    tokenizer: PathText | None = None
    """Folder or name of the tokenizer. null: the model's."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of the weights; `auto`: as they were saved."""
    quantization: Literal["nf4", "fp4", "int8"] | None = None
    """Linear layers in 4 bits through bitsandbytes, with double quantisation, or in 8 bits through
    torchao, a scale a row; under `lora`."""
    float8: Literal["rowwise_with_gw_hp", "rowwise"] | None = None
    """Products of linear layers in float8 through torchao, a scale a row; not under `lora`."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: the GPU where there is one."""
    rope: RopeSettings | None = None
    """Position extension, written into the model's own config."""
    max_position_embeddings: Count | None = None
    """Positions the model is declared to have from now on, where a new `rope_theta` extends it."""


class LoraSettings(Section):
    r: Annotated[int, Field(ge=1, le=2**16)] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale of the adapters: alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """On the adapters' input."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get adapters, or `all-linear`."""
    modules_to_save: Names | None = None
    """Layers that are trained whole and saved with the adapters, such as `embed_tokens`."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r)."""


class HubSettings(Section):
    """A data set on the Hugging Face hub, or a folder that `datasets` reads as one."""

    dataset: PathText
    """Its name, such as `HuggingFaceH4/ultrachat_200k`."""
    subset: str | None = None
    """Its configuration, where it has several."""
    split: str = "train"
    """Such as `train`, `train[:1000]` or `train_sft`."""
    revision: str | None = None
    """Branch, tag or commit."""


Origins = Annotated[
    list[PathText | HubSettings], BeforeValidator(_one_or_more), Field(min_length=1)
]


class DataSettings(Section):
    train: Origins
    """Files, folders, patterns such as `books/**/*.txt`, data sets of the hub by name; one or a \
list."""
    eval: Origins | None = None
    """Likewise, for evaluation."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training sequences held out for evaluation, where `eval` is null."""
    format: Literal["auto", "text", "jsonl", "parquet", "csv", "arrow"] = "auto"
    """Of the files; `auto`: by the suffix. A text file is one document, otherwise a row is one."""
    kind: Literal["auto", "text", "messages", "completion", "tokens"] = "auto"
    """What a row holds; `auto`: by the columns it has."""
    text_field: str = "text"
    """Column that has the text, of kind `text`."""
    messages_field: str = "messages"
    """Column that has the conversation, of kind `messages`: a list of `role` and `content`."""
    prompt_field: str = "prompt"
    """Column of kind `completion`: what is given."""
    completion_field: str = "completion"
    """Column of kind `completion`: what is learnt."""
    images: bool | None = None
    """Messages have images, and `model.name` sees them. null: where one of the first rows of a \
file has some."""
    chat_template: PathText | None = None
    """File of Jinja in place of the tokenizer's template; `trl`: TRL's for the model's family."""
    arrange: Literal["windows", "packed"] = "windows"
    """`windows`: each document is cut into sequences of `context` tokens. `packed`: several \
documents share a sequence and do not see each other."""
    simulated_context: Annotated[Tokens, Field(ge=2, lt=2**31)] | None = None
    """Positions, such as `128K`, that each training document is spread over: some are skipped \
between pieces of it, so that a short text shows the distances of a long one. null: as they are."""
    simulated_pieces: Annotated[int, Field(ge=2, le=2**16)] = 8
    """Pieces of a document between which positions are skipped, with `simulated_context`."""
    add_bos: bool | None = None
    """Begin each document with the tokenizer's BOS token. null: as the tokenizer does by itself."""
    add_eos: bool = True
    """End each document with the tokenizer's EOS token."""
    num_proc: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that tokenise. null: the cores there are, 16 at most."""
    cache_dir: PathText | None = None
    """Folder of the tokenised text. null: the cache of Hugging Face datasets."""

    @model_validator(mode="after")
    def _one_evaluation_set(self) -> DataSettings:
        if self.eval is not None and self.eval_fraction > 0:
            raise ValueError("eval_fraction: expected 0 where eval has files, got both")
        return self


class OptimizerSettings(Section):
    name: str = "adamw_torch"
    """As `optim` of transformers' TrainingArguments: `adamw_torch`, `adafactor`, `sgd`, …"""
    learning_rate: Rate = 1e-5
    """Peak of the schedule."""
    weight_decay: Rate = 0.0
    """Not on biases and norms."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of Adam."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Of Adam."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Of Adam."""
    arguments: dict[str, Scalar] = Field(default_factory=dict)
    """As `optim_args` of transformers, for the optimizers that read it."""
    states: Literal["device", "host"] = "device"
    """Where it keeps its states; `host`: they come to the device some parameters at a time. \
Changes no bit."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from transformers.training_args import OptimizerNames  # heavy

        return _expect_name(name, [str(option.value) for option in OptimizerNames])

    @model_validator(mode="after")
    def _one_place(self) -> OptimizerSettings:
        if self.states == "host" and self.name.startswith("paged_"):
            raise ValueError(
                f"states: expected 'device' beside {self.name!r}, which pages its states to the "
                f"host by itself, got 'host'; take {self.name.removeprefix('paged_')!r}"
            )
        return self


class ScheduleSettings(Section):
    name: str = "linear"
    """As `lr_scheduler_type` of transformers: `linear`, `cosine`, `constant_with_warmup`, …"""
    warmup_steps: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Optimizer steps in which the rate rises from 0."""
    arguments: dict[str, Scalar] = Field(default_factory=dict)
    """As `lr_scheduler_kwargs` of transformers."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from transformers import SchedulerType  # heavy

        return _expect_name(name, [str(option.value) for option in SchedulerType])


def _expect_name(name: str, names: list[str]) -> str:
    if name not in names:
        known = nearest(name, names) or f" (known: {', '.join(names)})"
        raise ValueError(f"expected a name that transformers knows, got {name!r}{known}")
    return name


class TrainingSettings(Section):
    steps: Count | None = None
    """Optimizer steps; wins over `epochs`."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the data, where `steps` is null."""
    batch_size: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Sequences per call of the engine."""
    accumulation_steps: Count = 1
    """Calls of the engine per optimizer step."""
    max_grad_norm: Rate = 1.0
    """Gradients are clipped to this norm; 0: not at all."""
    autocast: Literal["bfloat16"] | None = None
    """Mixed precision: matrix products in this dtype, weights in `model.dtype`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the order of the data, dropout and new weights."""


class GenerationSettings(Section):
    prompts: Annotated[list[str], BeforeValidator(_one_or_more), Field(min_length=1)]
    """What the model goes on from; one or a list."""
    chat: bool = False
    """Each prompt is a user's turn, written by the chat template."""
    max_new_tokens: Annotated[int, Field(ge=1, le=2**17)] = 64
    """Tokens that it writes at most."""
    temperature: Rate = 0.0
    """Of sampling; 0: the likeliest token each time."""


class EvaluationSettings(Section):
    every_steps: Count | None = None
    """Optimizer steps between evaluations. null: at the end only, where there is data for it."""
    at_start: bool = False
    """Evaluate before the first step too."""
    max_sequences: Count | None = None
    """Evaluate on so many sequences at most, the first ones. null: all."""
    batch_size: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Sequences per call."""
    generate: GenerationSettings | None = None
    """Let the model write at each evaluation: in the log, and in `samples.jsonl` of the run."""


class SavingSettings(Section):
    every_steps: Count | None = 100
    """Optimizer steps between checkpoints. null: at the end and on a signal only."""
    keep_last: Count = 2
    """Checkpoints that are kept."""
    push_to_hub: str | None = None
    """Name on the Hugging Face hub, such as `me/my-model`, where the final model goes."""
    private: bool = True
    """Whether a name that is new there is private."""


class ParallelSettings(Section):
    """What several processes do, where torchrun starts them."""

    cp: Count | None = None
    """Processes that share each sequence; a divisor of all. Groups of so many train on sequences \
of their own, and their gradients are added. null: all share each sequence."""
    weights: Literal["auto", "replicated", "zero1", "zero2", "zero3"] = "auto"
    """Whole on each process, or shared by those of a sequence, as `engine.sharded_weights` says. \
`auto`: the first of these that fits by the plan."""


class LoggingSettings(Section):
    every_steps: Count = 1
    """Optimizer steps between records for `report_to`."""
    report_to: Names = Field(default_factory=list)
    """Trackers by transformers' names: `tensorboard`, `wandb`, `mlflow`, …"""
    chunk_records_every: Count = 100
    """Steps between two whose chunks and page choices are recorded; the first always is."""


# Fields of `data` that mean nothing to TRL's trainers.
_OF_SFT = ("kind", "arrange", "simulated_context", "text_field", "messages_field", "add_bos")


class RunSettings(Section):
    output_dir: PathText
    """Folder of the run; new or empty, unless `--resume` is given."""
    task: Literal["sft", "dpo", "kto", "grpo", "rloo", "reward"] = "sft"
    """What is learnt: `sft`, the next token; the others through TRL's trainers, see \
[Preferences and policies](#preferences-and-policies)."""
    trl: dict[str, Any] = Field(default_factory=dict)
    """Options of TRL's configuration of the task, by TRL's names, such as `beta`."""
    rewards: Names = Field(default_factory=list)
    """Of `grpo` and `rloo`: functions of `trl.rewards` by name, or `package.module.function`."""
    model: ModelSettings
    lora: LoraSettings | None = None
    """Train adapters through peft. null: train every weight."""
    data: DataSettings
    context: Annotated[Tokens, Field(ge=2, lt=2**31)]
    """Tokens per sequence at most; `128K` is 131072, `1M` is 1048576."""
    engine: EngineSettings = EngineSettings()
    parallel: ParallelSettings = ParallelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    saving: SavingSettings = SavingSettings()
    logging: LoggingSettings = LoggingSettings()

    @model_validator(mode="after")
    def _quantized_bases_have_adapters(self) -> RunSettings:
        if self.model.quantization is not None and self.lora is None:
            raise ValueError(
                "model.quantization: expected the section lora beside it, got none; quantised "
                "weights cannot be trained themselves"
            )
        return self

    @model_validator(mode="after")
    def _task_has_what_it_needs(self) -> RunSettings:
        if bool(self.rewards) != (self.task in ("grpo", "rloo")):
            raise ValueError(
                "rewards: expected functions for task grpo and rloo, none for others, got "
                f"{self.rewards} for {self.task}"
            )
        if self.task == "sft":
            if self.trl:
                raise ValueError("trl: expected a task of TRL beside it, got 'sft'")
            return self
        for name in _OF_SFT:
            default = DataSettings.model_fields[name].default
            if getattr(self.data, name) != default:
                raise ValueError(
                    f"data.{name}: expected {default!r} for task {self.task}, got "
                    f"{getattr(self.data, name)!r}"
                )
        return self

    @model_validator(mode="after")
    def _float8_trains_whole(self) -> RunSettings:
        float8, lora = self.model.float8, self.lora is not None
        if float8 is not None and (lora or self.task != "sft"):
            beside = "the section lora" if lora else f"task {self.task}"
            raise ValueError(f"model.float8: expected null beside {beside}, got {float8!r}")
        return self

    @model_validator(mode="after")
    def _simulates_more(self) -> RunSettings:
        simulated = self.data.simulated_context
        if simulated is not None and simulated <= self.context:
            raise ValueError(
                f"data.simulated_context: expected more than context {self.context:,}, got "
                f"{simulated:,}"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_has_data(self) -> RunSettings:
        no_data = self.data.eval is None and self.data.eval_fraction == 0
        for name in ("every_steps", "generate"):
            if getattr(self.evaluation, name) is not None and no_data:
                raise ValueError(
                    f"evaluation.{name}: expected data.eval or data.eval_fraction beside it, got "
                    "neither"
                )
        return self
