"""Mutation runs make small changes to source files, one at a time, and tell whether the tests notice them.

A test suite that passes whatever a line says does not test that line. `changes` finds what can be changed, `reach`
which tests go through it, `workshop` keeps copies of the tree, `trial` runs one change, `command` puts it together.
"""
