#!/bin/sh
# Makes the files of the two secrets that every server needs, below FOLDER (default: secrets):
#     tls/     ca.crt, tls.crt, tls.key: one certificate for all services, of an authority made for it
#     tokens/  accepted (lines `identity token`), and the tokens draft-worker, vllm, comparison and target
# Where cert-manager issues certificates, use its secret instead of tls/. Needs openssl 3.
set -eu
umask 077
folder=${1:-secrets}
mkdir -p "$folder/tls" "$folder/tokens"
cd "$folder"
names=DNS:localhost,IP:127.0.0.1
for service in target draft fused openai prefill; do names="$names,DNS:$service.tandem.svc"; done
openssl req -x509 -newkey rsa:3072 -nodes -days 365 -subj "/CN=Tandem's authority" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign -keyout ca.key -out tls/ca.crt 2>/dev/null
openssl req -x509 -newkey rsa:3072 -nodes -days 365 -subj "/CN=tandem" -CA tls/ca.crt -CAkey ca.key \
    -addext "subjectAltName=$names" -addext basicConstraints=critical,CA:FALSE -keyout tls/tls.key -out tls/tls.crt 2>/dev/null
for identity in draft-worker vllm comparison target; do
    openssl rand -hex 32 > "tokens/$identity"
    echo "$identity $(cat "tokens/$identity")"
done > tokens/accepted
