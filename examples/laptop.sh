# Overrides that make any example small enough to try on a laptop's CPU: two narrow layers, ten steps, a text made here.
#   . examples/laptop.sh
#   argosy launch examples/aks-gpt3-375m.yaml --target local $LAPTOP
# shellcheck shell=sh disable=SC2034
LAPTOP="model.layers=2 model.hidden=64 model.heads=4 model.kv_heads=4 model.head_dim=16 model.ffn=128 model.vocab_size=320
  init_from=null
  data.tokenizer=bytes data.seq_len=64 data.split=[90,10,0] data.train=corpus data.train.0.prepare.inputs=[text.jsonl]
  train.global_batch=8 train.steps=10 optim.warmup=2 parallel={} checkpoint.every=5 log.every=1
  runs_dir=runs cluster.instance=null cluster.gpus=0 cluster.nodes=1 cluster.fabric=auto cluster.secrets={}"
seq 400 | sed 's/.*/{"text": "This is sentence number & of a very small corpus, and & is its number."}/' > text.jsonl
