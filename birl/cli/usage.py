"""Texts of `birl COMMAND --help`, for commands whose module is slow to import or has several."""

USAGE = {
    "status": """\
Usage: birl status RUN [--trust]

Every process of a training that `birl launch` started; exits with 1 where one has failed. --trust: also where another
account launched it, whose launch.json says which cluster is asked.""",
    "logs": """\
Usage: birl logs RUN [ROLE] [--follow] [--trust]

What the processes of a launched training have printed.""",
    "stop": """\
Usage: birl stop RUN [--trust]

Lets a launched training save and end.""",
    "scale": """\
Usage: birl scale RUN engines=+2 | engines=-1 | engines=4 [--trust]

Adds engines to a launched training that runs, or takes some away. A new one gets the current weights before
its first request; one that leaves answers what it has.""",
    "plan": """\
Usage: birl plan [MODEL or RUN] [FILE.yaml] [key=value ...] [device=KIND] [--memory GIB] [--json]

Takes what `birl rl` takes, but reads neither weights nor data. Predicts the memory of generation and training,
and the largest micro-batch and batch that fit into --memory (default: what is free), or on a GPU of that KIND.

       birl plan --simulate [RUN or FILE] [section.key=value ...] [--measured FILE] [--json]

How to split GPUs into engines and learners, simulated from the times of the parts, and who would wait for whom.
Default: SmolLM2-135M on two CPU cores.

       birl plan --cluster [MODEL] [gpu=KIND] [gpus=N] [batch=TOKENS] [sequence=TOKENS] [key=value] [--json]

Which layouts ddp x fsdp x cp x tp x ep of a model fit on a cluster, and which are fastest, from data sheets.
MODEL: a folder with config.json, a run, or a known name such as llama3-70b. KIND: a100-40,
a100-80, h100, h200, b200, gb200, l40s, a10g, rtx4090, t4.""",
    "reproduce": """\
Usage: birl reproduce                                        list the recipes
       birl reproduce NAME [--seed N] [--dry-run] [key=value ...]

Runs a recipe of recipes/ into runs/reproduce/NAME/seed-N and compares what it gives with NAME.expected.yaml.
Exits with 0 when everything is within the band, 1 when something is outside or there is no band. The same
command again goes on where it was. --dry-run checks the configurations and prints the commands.""",
    "chat": """\
Usage: birl chat [MODEL or RUN] [key=value ...]

MODEL is a folder, a .gguf file, a hub id or smollm2 (default).""",
    "runs": """\
Usage: birl runs [FOLDER ...] [--json]

The runs in runs/ or in FOLDER, the newest first.

state   running; done; stopped (by a signal, and saved);
        failed (it ended without saying so: an error, a kill, a power cut)
reward  of the last step
time    of all its processes""",
    "diff": """\
Usage: birl diff RUN RUN [--json]

The keys of the configuration that differ, then the figures side by side; `last` is the mean of the last ten steps.""",
    "ledger": """\
Usage: birl ledger RUN

Adds up RUN/ledger.jsonl; exits with 1 where it does not close.""",
    "checkpoints": """\
Usage: birl checkpoints RUN                       list
       birl checkpoints RUN verify [STEP]         compare every file with its digest; 1 where one differs
       birl checkpoints RUN export STEP FOLDER [--shard-gb N]
                                                  write a Hugging Face model folder (STEP: number, last, best)
       birl checkpoints RUN export STEP FILE.gguf [--type f16|bf16|f32|q8_0]
                                                  write a file for llama.cpp
       birl checkpoints RUN export-adapter STEP FOLDER
                                                  of a run with lora.rank: the adapter alone, in peft's format
       birl checkpoints RUN prune N               keep the newest N and the best
       birl checkpoints RUN convert               rewrite those of earlier versions, whose index is a pickle""",
    "cache": """\
Usage: birl cache [list]        converted models and their size
       birl cache clear NAME    remove those whose name begins so
       birl cache clear --all   remove all
       birl cache verify        find damaged ones; 1 where there is one""",
    "doctor": """\
Usage: birl doctor

Exits with 0 when `birl rl` could run here, else with 1.""",
}
