#!/usr/bin/env bash
# certificates.sh NAME ADDRESS: a certificate authority of your own (ca.key, ca.crt), and with it the certificate
# of a SuperLink (server.key, server.crt) that is reached by this host name and IP address. The authority ends after
# ten years, and the SuperLink's certificate after one: run this again for a new one.
set -euo pipefail
name=$1 address=$2
umask 077  # keys are for their owner alone
if [ ! -e ca.key ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -keyout ca.key -out ca.crt -subj "/CN=federation" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout server.key -out server.csr -subj "/CN=$name"
printf 'subjectAltName=DNS:%s,IP:%s\nextendedKeyUsage=serverAuth\n' "$name" "$address" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -out server.crt -extfile server.ext
rm server.csr server.ext
