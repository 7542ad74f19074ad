"""Mixtures of experts. Those of mixed formats are multiplied one by one in torch.

routing                   router
products                  mixture; 4-bit weights int4
parts                     tiles, weights
"""
