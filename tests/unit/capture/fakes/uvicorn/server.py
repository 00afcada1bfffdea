class Server:
    async def serve(self) -> None:
        await self.startup()
        await self.main_loop()

    async def startup(self, sockets: object = None) -> None:
        return None

    async def main_loop(self) -> None:
        return None
