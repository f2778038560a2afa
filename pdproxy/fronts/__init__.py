"""Fronts carry the traffic, and one leader decides whose turn it is.

A front is a process that has clients and engines at its two ends. The leader has the kernel, and judges the fleet. The
two talk over one connection, in the words of `messages`.
"""
