class Server:
    async def startup(self, sockets: object = None) -> None:
        return None
