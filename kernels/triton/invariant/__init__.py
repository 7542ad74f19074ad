"""What batch-invariant engines have of their own. Their other operations are those of every engine.

operations                table
products                  linear; 4-bit weights int4
attention                 attention; its kernels are in attention_kernels
"""
