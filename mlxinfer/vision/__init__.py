"""Pictures in prompts: decoding under limits, the pre-processing of each model family, and the placeholders in the text.

Nothing here needs a model. `picture.read_picture` decodes. `families.open_processor` reads a checkpoint's settings. `prompt` expands the
rendered template, finds the image rows among the token ids, and computes the three axes of M-RoPE.
"""
