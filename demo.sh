#!/bin/sh
# The main job on real text, each step as the command that a user would type. `make demo` runs this.
# Safe to interrupt and to repeat: what is finished is not done again. DEMO_TEXTS=shipped needs no network.
set -eu
TRIPTYCH=${TRIPTYCH:-triptych}
quoted() {
  for word in "$@"; do
    case $word in
      *"'"*) printf ' "%s"' "$word" ;;
      *[!A-Za-z0-9_./-]*) printf " '%s'" "$word" ;;
      *) printf ' %s' "$word" ;;
    esac
  done
}
run() { printf '\n$ triptych%s\n' "$(quoted "$@")"; "$TRIPTYCH" "$@"; }

corpus=novels-gutenberg held_out="[carroll-alice]" tasks=configs/demo/finetune
for name in "$corpus" reviews-movies summaries-xsum verses-en-de; do
  if [ "${DEMO_TEXTS:-}" != shipped ] && ! run data get "$name"; then
    echo "demo: $name cannot be fetched; the demo goes on with small texts written for this project"
    DEMO_TEXTS=shipped
  fi
done
if [ "${DEMO_TEXTS:-}" = shipped ]; then
  corpus=configs/demo/texts/novel.txt held_out='[]' tasks=demo/tasks
  mkdir -p "$tasks"
  for pair in sentiment:reviews summarization:summaries translation:sentences; do
    sed "s|^  train: .*|  train: configs/demo/texts/${pair#*:}.jsonl|" "configs/demo/finetune/${pair%:*}.yaml" > "$tasks/${pair%:*}.yaml"
  done
fi

run corpus inspect "$corpus" --validation_books "$held_out"
run tokenizer train --corpus "$corpus" --validation_books "$held_out" --vocab_size 4096 --output demo/tokenizer
run compare --config configs/study/demo.yaml \
  --tasks "[$tasks/sentiment.yaml, $tasks/summarization.yaml, $tasks/translation.yaml]" \
  --pretrain_options "{data.corpus: '[$corpus]', data.validation_books: '$held_out', ${DEMO_STEPS:+trainer.max_steps: '$DEMO_STEPS'}}" \
  --task_options "{${DEMO_STEPS:+trainer.max_steps: '$DEMO_STEPS'}}"
run predict demo/study/sentiment-encoder-1-*/bundle "A moving story, told with warmth and wit." "Two hours of my life that I want back."
run generate demo/study/pretrain-decoder-1-*/bundle "The captain looked at" --max_new_tokens 40 --temperature 0.8 --seed 1
run attention demo/study/pretrain-encoder-1-*/bundle "Alice was beginning to get very <mask> of sitting by her sister." --output demo/attention
run runs demo/study
