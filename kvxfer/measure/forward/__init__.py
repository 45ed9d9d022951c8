"""The forward pass of one layer in torch, a file per part of it. Only measure.layers imports these, when it builds."""
