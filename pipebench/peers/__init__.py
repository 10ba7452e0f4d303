"""Every engine on the bench behind the same few methods, this project's and other projects', on equal terms."""
