#!/bin/sh
# The main job on real novels, each step as the command that a user would type. `make demo` runs this.
# Safe to interrupt and to repeat: what is finished is not done again.
set -eu
TRIPTYCH=${TRIPTYCH:-triptych}
run() { printf '\n$ triptych %s\n' "$*"; "$TRIPTYCH" "$@"; }

run corpus inspect novels-gutenberg --validation_books carroll-alice
run tokenizer train --corpus novels-gutenberg --validation_books carroll-alice --vocab_size 4096 --output demo/tokenizer
run tokenizer compare demo/tokenizer --text "$("$TRIPTYCH" data get novels-gutenberg)/carroll-alice.txt"
for family in encoder decoder encoder-decoder; do
  run pretrain --config configs/pretrain/$family.yaml --config configs/model/tiny.yaml --config configs/pretrain/demo.yaml \
    --run_dir demo/$family
done
for family in encoder decoder encoder-decoder; do
  run finetune --config configs/finetune/sentiment.yaml --init_from demo/$family/bundle --data.limit 4000 \
    --optim.lr 1e-3 --trainer.max_epochs 1 --trainer.validation_samples 200 --run_dir demo/sentiment-$family
done
run predict demo/sentiment-encoder/bundle "A moving story, told with warmth and wit." "Two hours of my life that I want back."
run generate demo/decoder/bundle "The captain looked at" --max_new_tokens 40 --temperature 0.8 --seed 1
run attention demo/encoder/bundle "Alice was beginning to get very <mask> of sitting by her sister." --output demo/attention
run runs demo
