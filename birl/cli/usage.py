"""Texts of `birl COMMAND --help`, for commands whose module is slow to import or has several."""

USAGE = {
    "status": """\
Usage: birl status RUN [--trust]

Lists the processes of a training that `birl launch` started; exits with 1 if one has failed. --trust: also accept a
launch.json of another account, which selects the cluster that is contacted.""",
    "logs": """\
Usage: birl logs RUN [ROLE] [--follow] [--trust]

Prints the output of a launched training's processes.""",
    "stop": """\
Usage: birl stop RUN [--trust]

Makes a launched training save a checkpoint and end.""",
    "scale": """\
Usage: birl scale RUN engines=+2 | engines=-1 | engines=4 [--trust]

Adds engines to a running launched training, or removes some. A new engine gets the current weights before
its first request; a removed one finishes its running requests.""",
    "plan": """\
Usage: birl plan [MODEL or RUN] [FILE.yaml] [key=value ...] [device=KIND] [--memory GIB] [--json]

Takes the arguments of `birl rl`, but reads neither weights nor data. Predicts the memory of generation and training,
and the largest micro-batch and batch that fit into --memory (default: the free memory), or on a GPU of that KIND.

       birl plan --simulate [RUN or FILE] [section.key=value ...] [--measured FILE] [--json]

Simulates splits of GPUs into engines and learners from the times of the parts, with the waits of each side.
Default: SmolLM2-135M on two CPU cores.

       birl plan --cluster [MODEL] [gpu=KIND] [gpus=N] [batch=TOKENS] [sequence=TOKENS] [key=value] [--json]

Lists the layouts ddp x fsdp x cp x tp x ep of a model that fit on a cluster, fastest first, from data sheets.
MODEL: a folder with config.json, a run, or a known name such as llama3-70b. KIND: a100-40,
a100-80, h100, h200, b200, gb200, l40s, a10g, rtx4090, t4.""",
    "reproduce": """\
Usage: birl reproduce                                        list the recipes
       birl reproduce NAME [--seed N] [--dry-run] [key=value ...]

Runs a recipe of recipes/ in runs/reproduce/NAME/seed-N and compares its results with NAME.expected.yaml.
Exits with 0 if all results are within the expected band, 1 if one is outside or there is no band. An interrupted
run resumes with the same command. --dry-run checks the configurations and prints the commands.""",
    "chat": """\
Usage: birl chat [MODEL or RUN] [key=value ...]

MODEL is a folder, a .gguf file, a hub id or smollm2 (default).""",
    "runs": """\
Usage: birl runs [FOLDER ...] [--json]

Lists the runs in runs/ or in FOLDER, newest first.

state   running; done; stopped (by a signal, after saving);
        failed (ended by an error, a kill or a power cut)
reward  reward of the last step
time    total time of all its processes""",
    "diff": """\
Usage: birl diff RUN RUN [--json]

Prints the configuration keys that differ, then the metrics side by side; `last` is the mean of the last ten steps.""",
    "ledger": """\
Usage: birl ledger RUN

Adds up RUN/ledger.jsonl: the use of every sampled token.
Exits with 1 if the sums differ or a token was trained twice.""",
    "checkpoints": """\
Usage: birl checkpoints RUN                       list
       birl checkpoints RUN verify [STEP]         compare every file with its digest; exits with 1 if one differs
       birl checkpoints RUN export STEP FOLDER [--shard-gb N]
                                                  write a Hugging Face model folder (STEP: number, last, best)
       birl checkpoints RUN export STEP FILE.gguf [--type f16|bf16|f32|q8_0]
                                                  write a file for llama.cpp
       birl checkpoints RUN export-adapter STEP FOLDER
                                                  for runs with lora.rank: only the adapter, in peft's format
       birl checkpoints RUN prune N               keep the newest N and the best
       birl checkpoints RUN convert               rewrite checkpoints of earlier versions, whose index is a pickle""",
    "cache": """\
Usage: birl cache [list]        list converted models and their sizes
       birl cache clear NAME    remove models whose name begins with NAME
       birl cache clear --all   remove all
       birl cache verify        find damaged models; exits with 1 if there is one""",
    "doctor": """\
Usage: birl doctor

Exits with 0 if `birl rl` can run here, else with 1.""",
}
