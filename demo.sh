#!/bin/sh
# The main job on real novels, each step as the command that a user would type. `make demo` runs this.
set -eu
TRIPTYCH=${TRIPTYCH:-triptych}
run() { printf '\n$ triptych %s\n' "$*"; "$TRIPTYCH" "$@"; }

run corpus inspect novels-gutenberg --validation_books carroll-alice
run tokenizer train --corpus novels-gutenberg --validation_books carroll-alice --vocab_size 8192 --output demo/tokenizer
run tokenizer compare demo/tokenizer --text "$("$TRIPTYCH" data get novels-gutenberg)/carroll-alice.txt"
run prepare --corpus novels-gutenberg --validation_books carroll-alice --tokenizer demo/tokenizer --output demo/stores
