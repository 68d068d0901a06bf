#!/bin/sh
# A C++ compiler that replaces every -std=...14 (or older) by the standard in
# BYTESCHEDULER_BUILD_STD, for source distributions that fix a standard older than today's torch
# headers need. BYTESCHEDULER_BUILD_CXX names the real compiler, BYTESCHEDULER_BUILD_FLAGS further
# flags. -march=native is dropped, since a cached wheel may meet another processor. Named by CXX.
for argument do
    shift
    case $argument in
        -march=native) continue ;;
        -std=*++98 | -std=*++0x | -std=*++11 | -std=*++14) argument=-std=$BYTESCHEDULER_BUILD_STD ;;
    esac
    set -- "$@" "$argument"
done
exec $BYTESCHEDULER_BUILD_CXX $BYTESCHEDULER_BUILD_FLAGS "$@"
