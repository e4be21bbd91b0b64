#!/bin/sh
# Calls a server of the digits model with curl: sh examples/predict_curl.sh [URL]
# The server: make serve. Where it has a key, set MLP_API_KEY here as well.
set -eu
url=${1:-http://127.0.0.1:8000}

# --fail-with-body: an error's sentence is shown, and the exit status tells of it.
call() {
    curl --silent --show-error --fail-with-body -H "X-API-Key: ${MLP_API_KEY:-}" -H 'Content-Type: application/json' "$@"
    echo
}

# One row of 64 numbers from 0 to 16, the pixels of a handwritten zero.
zero='[0,0,5,13,9,1,0,0, 0,0,13,15,10,15,5,0, 0,3,15,2,0,11,8,0, 0,4,12,0,0,8,8,0,
       0,5,8,0,0,9,8,0, 0,4,11,0,1,12,7,0, 0,2,14,5,10,12,0,0, 0,0,6,13,10,0,0,0]'

# On the server's default backend, and on one that is named; the reply says what ran and where the time went.
call "$url/predict" -d "{\"inputs\": $zero}"
call "$url/predict/eager" -d "{\"inputs\": $zero}"

# Two rows at once, with a name for the request and a limit for it.
call "$url/predict" -d "{\"inputs\": [$zero, $zero], \"id\": \"two zeros\", \"timeout_ms\": 5000}"

# The same rows through every backend, with the differences between them.
call "$url/compare" -d "{\"inputs\": $zero}"

# The same as a tensor of the Open Inference Protocol.
call "$url/v2/models/digits/infer" \
    -d "{\"inputs\": [{\"name\": \"input\", \"shape\": [1, 64], \"datatype\": \"FP32\", \"data\": $zero}]}"
