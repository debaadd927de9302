"""Draft heads: their modules, the folders they are saved in, and the layouts of other engines.

parts       layers, sizes and vocabularies that the modules share
eagle, parallel (Medusa, blockwise), mtp, space, int4_draft     one module each, with its configuration
folder      a head as a folder; which method has which module
card        the model card, from the record of the training
exchange    heads that others published, and ours for other engines
"""
