#!/usr/bin/env bash
# One GPU, end to end: train, kill and resume bit for bit, sample, evaluate. Run from the repository root.
set -euo pipefail
root=$PWD; export PYTHONPATH=$root/src:${EXTRA_PYTHONPATH:-}
work=$(mktemp -d); cd "$work"
python3 - <<'P'
import glob, json, sysconfig
with open("c.jsonl", "w") as f:
    for p in sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))[:80]:
        f.write(json.dumps({"text": open(p, errors="ignore").read()}) + "\n")
P
python3 -m argosy data prepare c.jsonl --tokenizer bytes --output corpus
cat > run.yaml <<'Y'
model: {family: llama, layers: 4, hidden: 256, heads: 4, kv_heads: 2, vocab_size: 257, dropout: 0.1}
data: {train: corpus, seq_len: 256, split: [90, 10, 0]}
train: {global_batch: 16, steps: 400, device: cuda}
parallel: {micro_batch: 8}
optim: {lr: 1.0e-3, warmup: 5}
eval: {every: 100, batches: 2}
checkpoint: {every: 25}
log: {every: 50}
Y
python3 -m argosy train run.yaml name=undisturbed
for seconds in 8 10 12; do timeout -s KILL $seconds python3 -m argosy train run.yaml name=killed --quiet || true; done
python3 -m argosy train run.yaml name=killed
for file in weights optimizer; do
  cmp runs/{undisturbed,killed}/checkpoints/step-00000400/$file.safetensors && echo "$file bit-equal after three kills"
done
python3 -m argosy sample runs/killed --prompt 'import ' --tokens 60
python3 -m argosy eval runs/killed --json
