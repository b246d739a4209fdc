"""The sub-commands of ``octavo``, one module each, loaded when they are called."""
