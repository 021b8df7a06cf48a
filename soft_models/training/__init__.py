"""Training and validation of any timm model: what the scripts ``train.py`` and ``validate.py`` are made of.

A run of training passes through the files like this::

    train         the whole, from the command line to the exit code
      config      the options, which commands.cli reads from the command line and YAML
      runtime     device, processes, precision, signals
      plan        options, data and checkpoint checked against each other, before anything is built
        sources     the splits: an image folder (folders, images) or a named dataset
        resume      the checkpoint to go on from (checkpoints.extras reads what training stored in it)
      models      the model, with the weights that it starts from (weights: which of a file's, and that they fit)
      run         loaders, learner, saver put together; then epoch after epoch
        data        datasets and loaders (sampling: which image when; augment: what happens to a batch)
        learner     model, optimizer, schedule, average
        engine      one epoch of training, one pass of evaluation
        saver       checkpoints; scalars for TensorBoard

``validate``, as the other commands of the package, starts from a checkpoint (trained). What command lines share,
whatever they do, is in ``soft_models.commands``.
"""
