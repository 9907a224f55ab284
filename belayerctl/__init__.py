"""belayerctl: watch, move and break a host on purpose. Imports no daemon; one short file per verb."""
