"""Training and validation of any timm model: what the scripts ``train.py`` and ``validate.py`` are made of.

A run of training passes through the files like this::

    train         the whole, from the command line to the exit code
      cli         command line and YAML into the options, which config lists
      runtime     device, processes, precision, log, signals
      plan        options, data and checkpoint checked against each other, before anything is built
        sources     the splits: an image folder (folders, images) or a named dataset
        resume      the checkpoint to go on from (weights reads what training stored in it)
      models      the model, with the weights that it starts from
      run         loaders, learner, saver put together; then epoch after epoch
        data        datasets and loaders (sampling: which image when; augment: what happens to a batch)
        learner     model, optimizer, schedule, average
        engine      one epoch of training, one pass of evaluation (progress shows them)
        saver       checkpoints (files writes them whole or not at all); scalars for TensorBoard

``validate``, as the other commands of the package, starts from a checkpoint (trained). ``script`` holds what their
mains share, ``errors`` how mistakes of the caller are worded.
"""
