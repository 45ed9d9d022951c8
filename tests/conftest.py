"""Its place is its purpose: pytest puts this folder on the path, and every test can `import requirements`."""
