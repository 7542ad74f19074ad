"""Parts of a decoder layer: weights in, tensors through. They call `kernels.ops` and know no request."""
